"""How exact the load client is, beside others, against a server that knows when it sent what."""
