"""Turns request records into metrics. Pure: no pytest, no I/O."""
