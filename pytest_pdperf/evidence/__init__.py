"""Proves from the server side what really happened during a cell."""
