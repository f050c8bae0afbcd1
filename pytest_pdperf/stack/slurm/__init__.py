"""Starts the roles of a stack as steps of a Slurm job."""
