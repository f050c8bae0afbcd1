"""Loads the plugin for runs inside this repository, also where it is not installed."""

pytest_plugins = ["pytester"]
