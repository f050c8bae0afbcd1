"""Sends the planned requests and stamps what comes back."""
