"""Finds what is installed beside a program without running it: versions belong into every record, cheaply."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_HEAD_BYTES = 4096
_PYTHON = re.compile(r"^#! *(?P<path>\S*/python[0-9.]*)(?:\s|$)")
_PATHS = re.compile(r"^(?:export )?PYTHONPATH=(?P<paths>\S+)", re.MULTILINE)
_PACKAGES = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "lib64/python3*/site-packages")


def site_folders(program: Path) -> Iterator[Path]:
    """Folders in which the packages of a console script may lie, nearest first.

    They are those of the environment the script stands in, of the interpreter in its first line, and what a shell
    wrapper puts on PYTHONPATH.
    """
    head = head_of(program)
    prefixes = [program.parent.parent]
    if (python := _PYTHON.match(head)) is not None:
        prefixes.append(Path(python["path"]).parent.parent)
    for found in _PATHS.finditer(head):
        yield from (Path(part) for part in found["paths"].strip("'\"").split(":") if part)
    for prefix in dict.fromkeys(prefixes):
        for pattern in _PACKAGES:
            yield from sorted(prefix.glob(pattern))


def head_of(program: Path) -> str:
    """The first lines of a script; empty for what is no text or cannot be read."""
    try:
        with program.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return ""
    return "" if b"\0" in head else head.decode("utf-8", "replace")


def python_of(program: Path) -> Path | None:
    """The interpreter that a console script names in its first line, or None."""
    found = _PYTHON.match(head_of(program))
    return Path(found["path"]) if found else None


def commit_of(program: Path | None, distribution: str) -> str:
    """Commit that an installed distribution was built from, empty when it does not say.

    A direct install from a repository records it (PEP 610); packages built by setuptools-scm name it in their version
    (`0.26.1.dev3+g0123abc`) or in `_version.py`.
    """
    name = re.sub(r"[-_.]+", "_", distribution)
    for folder in site_folders(program) if program is not None else ():
        for info in sorted(folder.glob(f"{name}-*.dist-info")):
            for path, pattern in (
                (info / "direct_url.json", r'"commit_id": *"(?P<commit>[0-9a-f]{7,40})"'),
                (folder / name / "_version.py", r"commit_id = '(?P<commit>g?[0-9a-f]{7,40})'"),
            ):
                found = re.search(pattern, path.read_text("utf-8", "replace") if path.is_file() else "")
                if found:
                    return found["commit"].removeprefix("g")
            if built := re.search(r"\+(?:\w+\.)*g(?P<commit>[0-9a-f]{7,40})", info.name):
                return built["commit"]
            return ""
    return ""


def version_of(program: Path | None, distribution: str) -> str:
    """Version of a distribution installed beside `program`, `unknown` when it cannot be told."""
    name = re.sub(r"[-_.]+", "_", distribution)
    for folder in site_folders(program) if program is not None else ():
        for info in sorted(folder.glob(f"{name}-*.dist-info")):
            return info.name.removeprefix(f"{name}-").removesuffix(".dist-info")
    return "unknown"
