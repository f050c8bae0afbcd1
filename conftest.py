"""Loads the plugin for runs inside this repository, also where the package is not installed."""

from importlib.metadata import entry_points

_installed = any(entry.value == "pytest_pdperf.plugin" for entry in entry_points(group="pytest11"))

pytest_plugins = ["pytester"] if _installed else ["pytester", "pytest_pdperf.plugin"]
