"""Deployments that somebody else brought up: found, looked at, and measured as they are."""
