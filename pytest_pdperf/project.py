"""Where a project keeps what a run reads and writes."""

from __future__ import annotations

from pathlib import Path

from .errors import UsageProblem


def project_root(rootpath: Path, inipath: Path | None, invoked: Path) -> Path:
    """Folder that holds the project's fixtures/, baselines/ and results: pytest's root, unless it went astray.

    pytest finds its root before it knows this plugin's options, and takes the value of `--model /models/m`
    for a test path. A root without an ini file, or one that does not hold the current folder, is no project.
    """
    return rootpath if inipath is not None and rootpath in (invoked, *invoked.parents) else invoked


def make_folder(folder: Path) -> None:
    """Make the run's folder, and prove that it can be written to before anything starts. Raises UsageProblem."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as problem:
        raise UsageProblem(
            f"--pdperf-results: cannot write to {folder}: {problem.strerror}; give another folder"
        ) from None
