"""A simulated engine: real processes and real HTTP around a pure timing model. Always labelled SIMULATED."""
