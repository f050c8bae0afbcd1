"""Where the files lie that ship with the package: in its source tree, or copied into it when it was built."""

from __future__ import annotations

from pathlib import Path

import pytest_pdperf

COPIES = {
    "fixtures": "_fixtures",
    "tests/perf": "_perf",
    "baselines/published": "_published",
    "docs/examples": "_examples",
}
"""Folder of the source tree -> folder inside the built package."""


def shipped(folder: str) -> Path:
    """Where the copy of a source folder is; it need not exist."""
    package = Path(pytest_pdperf.__file__).resolve().parent
    source = package.parent / folder
    if (package.parent / "pyproject.toml").is_file() and source.is_dir():
        return source
    return package / COPIES[folder]


def published_folder() -> Path:
    """Tables that others published."""
    return shipped("baselines/published")
