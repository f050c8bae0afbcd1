"""YAML becomes frozen, validated models here, so that nothing later has to doubt its input."""
