"""Decides which devices a role runs on: the --gpus grammar, the inventory and placement."""
