"""One module an engine: how to start it and how to read what it says."""
