"""One module a router: how to start it and what it accepts."""
