"""What the numbers were made on, as rows of a table: one reading of the environment records for every report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from .source import Run, told_apart

_PLAIN = (
    ("host", "host (hash)"),
    ("kernel", "kernel"),
    ("cpu", "CPU"),
    ("cpus", "usable CPUs"),
    ("memory_gib", "memory, GiB"),
    ("numa_nodes", "NUMA nodes"),
    ("driver", "GPU driver"),
    ("cuda", "CUDA"),
)
_TOLD_ELSEWHERE = {"commands", "env", "gpus", "versions", "facts", "gpu_problem", "rdma"} | {
    key for key, _ in _PLAIN
}


@dataclass(frozen=True, slots=True)
class FactTable:
    """Columns are launches (or published tables), rows are facts; an empty text is "not recorded"."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]

    def common(self) -> dict[str, str]:
        """Facts that are the same in every column."""
        return {name: values[0] for name, values in self.rows if len(set(values)) == 1 and values[0]}

    def different(self) -> list[tuple[str, tuple[str, ...]]]:
        """Facts that are not."""
        return [(name, values) for name, values in self.rows if len(set(values)) > 1]


def fact_table(runs: Sequence[Run]) -> FactTable:
    """All facts of all launches."""
    owners: dict[str, list[Run]] = {}
    for run in runs:
        for launch in run.environments:
            owners.setdefault(launch, []).append(run)
    columns: list[tuple[str, dict[str, str]]] = []
    for run in runs:
        if run.published:
            columns.append((run.name, {"source": run.title, **run.facts}))
        for launch, record in run.environments.items():
            kin = owners[launch]
            place = next(number for number, one in enumerate(kin) if one is run)
            columns.append(
                (launch if len(kin) == 1 else f"{launch} ({told_apart(kin)[place]})", facts_of(record))
            )
    names = list(dict.fromkeys(name for _, found in columns for name in found))
    rows = tuple((name, tuple(found.get(name, "") for _, found in columns)) for name in names)
    return FactTable(tuple(column for column, _ in columns), rows)


def facts_of(record: Mapping[str, Any]) -> dict[str, str]:
    """One environment record as label -> text. Keys that this version does not know are shown as they are."""
    found = {label: _text(record.get(key)) for key, label in _PLAIN}
    found["GPUs"] = _gpus(record)
    found["RDMA"] = ", ".join(_text(port) for port in record.get("rdma") or ())
    for name, prefix in (("versions", "version: "), ("facts", "")):
        values = record.get(name)
        if isinstance(values, Mapping):
            found |= {f"{prefix}{key}": _text(value) for key, value in values.items()}
    found |= {str(key): _text(value) for key, value in record.items() if key not in _TOLD_ELSEWHERE}
    return {label: value for label, value in found.items() if value}


def commands_of(run: Run) -> list[tuple[str, str]]:
    """(launch / instance, full command line) of every process of a run."""
    found = []
    for launch, record in run.environments.items():
        commands = record.get("commands")
        if isinstance(commands, Mapping):
            found += [(f"{launch} / {name}", _text(command)) for name, command in commands.items()]
    return found


def settings_of(run: Run) -> list[tuple[str, str]]:
    """(launch / instance / variable, value) of every recorded environment variable."""
    found = []
    for launch, record in run.environments.items():
        for instance, values in _mapping(record.get("env")).items():
            found += [(f"{launch} / {instance} / {name}", _text(v)) for name, v in _mapping(values).items()]
    return found


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _gpus(record: Mapping[str, Any]) -> str:
    gpus = record.get("gpus")
    if not isinstance(gpus, list) or not gpus:
        problem = _text(record.get("gpu_problem"))
        return f"none ({problem})" if problem else "none"
    counts: dict[str, int] = {}
    for gpu in gpus:
        name = _text(gpu.get("name")) if isinstance(gpu, Mapping) else _text(gpu)
        counts[name] = counts.get(name, 0) + 1
    return " + ".join(f"{count} x {name}" for name, count in counts.items())


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return orjson.dumps(value, default=str).decode()
