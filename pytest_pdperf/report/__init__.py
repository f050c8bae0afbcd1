"""Shows results to people and to other tools."""
