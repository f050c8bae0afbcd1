"""Where a project keeps what a run reads and writes."""

from __future__ import annotations

from pathlib import Path

from .errors import UsageProblem
from .writing import try_room

ROOM_TO_BEGIN = 2**20
"""Bytes of disk that a run, and again each of its stacks, has to find for its logs before it begins."""


def project_root(rootpath: Path, inipath: Path | None, invoked: Path) -> Path:
    """Folder that holds the project's fixtures/, baselines/ and results: pytest's root, unless it went astray.

    pytest finds its root before it knows this plugin's options, and takes the value of `--model /models/m`
    for a test path. A root without an ini file, or one that does not hold the current folder, is no project.
    """
    return rootpath if inipath is not None and rootpath in (invoked, *invoked.parents) else invoked


def make_folder(folder: Path) -> None:
    """Make the run's folder, and prove that there is room in it before anything starts. Raises UsageProblem."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try_room(folder, ROOM_TO_BEGIN)
    except OSError as problem:
        raise UsageProblem(
            f"--pdperf-results: cannot write to {folder}: {problem.strerror}; give another folder"
        ) from None
