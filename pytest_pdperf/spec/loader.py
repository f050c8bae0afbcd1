"""The one way from a name or a file to a validated model: errors look alike and come before a start."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest_pdperf
from pytest_pdperf.errors import UsageProblem

from .document import Document, read_document
from .tolerances import Tolerances
from .topology import Topology
from .validation import suggestion, validate
from .workload import Workload
from .workload_file import read_workload

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_SUFFIXES = (".yaml", ".yml")


def load_topology(path: Path) -> Topology:
    """The topology in a YAML file; its name is the file's stem. Raises UsageProblem."""
    document = read_document(path)
    if "name" in document.data:
        raise document.problem(("name",), f"a topology is named by its file ({path.stem!r}); remove this key")
    return validate(Topology, {"name": _name(path), **document.data}, document, extra=("name",))


def load_workload(path: Path) -> Workload:
    """The workload in a YAML file; its name is the file's stem. Raises UsageProblem."""
    name = _name(path)
    return read_workload(read_document(path), name, path.parent)


def load_tolerances(path: Path) -> Tolerances:
    """The overrides in a tolerances file. Raises UsageProblem."""
    document: Document = read_document(path)
    return validate(Tolerances, document.data, document)


def find_topologies(names: Sequence[str], folders: Sequence[Path]) -> tuple[Topology, ...]:
    """Topologies by name (`topologies/NAME.yaml` in the first folder that has it) or by path ending in .yaml.

    Raises UsageProblem for an unknown name, naming the nearest, and for one that is given twice.
    """
    found: dict[str, Topology] = {}
    for name in names:
        topology = load_topology(_find(name, "topologies", "topology", folders))
        if topology.name in found:
            raise UsageProblem(f"topology {topology.name!r} is asked for twice")
        found[topology.name] = topology
    return tuple(found.values())


def find_workload(name: str, folders: Sequence[Path]) -> Workload:
    """A workload by name (`workloads/NAME.yaml`) or by path ending in .yaml. Raises UsageProblem."""
    return load_workload(_find(name, "workloads", "workload", folders))


def available(kind: str, folders: Sequence[Path]) -> tuple[str, ...]:
    """Names of the `topologies` or `workloads` (the argument) that the folders hold, sorted."""
    files = (path for folder in folders for path in (folder / kind).glob("*") if path.suffix in _SUFFIXES)
    return tuple(sorted({path.stem for path in files}))


def shipped_fixtures() -> Path:
    """Folder of the YAML that ships: `fixtures/` of a source tree, else the copy inside the package."""
    package = Path(pytest_pdperf.__file__).resolve().parent
    source = package.parent / "fixtures"
    if (package.parent / "pyproject.toml").is_file() and (source / "topologies").is_dir():
        return source
    return package / "_fixtures"


def _find(name: str, folder_name: str, what: str, folders: Sequence[Path]) -> Path:
    if name.endswith(_SUFFIXES):
        path = Path(name)
        if not path.is_file():
            near = [str(p) for p in sorted(path.parent.glob("*")) if p.suffix in _SUFFIXES]
            raise UsageProblem(f"no {what} file {name!r}{suggestion(name, near)}")
        return path
    for folder in folders:
        for suffix in _SUFFIXES:
            path = folder / folder_name / f"{name}{suffix}"
            if _NAME.match(name) and path.is_file():
                return path
    known = available(folder_name, folders)
    hint = (
        suggestion(name, known)
        or f"; none found in {', '.join(str(f / folder_name) for f in folders) or 'no folder'}"
    )
    raise UsageProblem(f"unknown {what} {name!r}{hint}")


def _name(path: Path) -> str:
    if not _NAME.match(path.stem):
        raise UsageProblem(
            f"{path}: the file's name becomes part of test ids: use letters, digits, `.`, `_` and `-`"
        )
    return path.stem
