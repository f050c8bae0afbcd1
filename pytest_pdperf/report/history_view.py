"""How a cell's numbers went over its launches, as text: for `pdperf history` and whoever looks for creep."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.gate.creep import find_creep, series_of
from pytest_pdperf.gate.fingerprint import BaselineKey, CellRef
from pytest_pdperf.gate.history import HistoryEntry, read_history
from pytest_pdperf.gate.verdict import number
from pytest_pdperf.measure.table import METRICS, Metric

BARS = "▁▂▃▄▅▆▇█"
MARKS = {"FAIL": "✕", "INVALID": "⊘", "SUSPECT": "!", "INCONCLUSIVE": "?", "IMPROVED": "▲"}


@dataclass(frozen=True, slots=True)
class Chain:
    """The launches of one cell under one key, oldest first."""

    key: BaselineKey
    ref: CellRef
    entries: tuple[HistoryEntry, ...]

    @property
    def name(self) -> str:
        """Topology and cell, as a reader looks for them."""
        return f"{self.key.topology} {self.ref.id}"

    def values(self, metric: str) -> list[tuple[HistoryEntry, float]]:
        """Launches that measured a metric."""
        return [(e, e.launch.values[metric]) for e in self.entries if e.launch and metric in e.launch.values]


def read_chains(paths: Sequence[Path]) -> tuple[list[Chain], list[str]]:
    """Chains of all `*.jsonl` files in the given files and folders, and lines that could not be read.

    Raises UsageProblem where there is no history at all.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            files += sorted(path.rglob("*.jsonl"))
        else:
            raise UsageProblem(f"{path}: no such history file or folder")
    if not files:
        raise UsageProblem(
            f"{', '.join(map(str, paths))}: no history (*.jsonl) here; runs on real engines write it"
        )
    found: dict[tuple[str, CellRef], list[HistoryEntry]] = {}
    problems: list[str] = []
    for file in files:
        read = read_history(file)
        problems += read.problems
        for entry in read.entries:
            found.setdefault((entry.key.digest, entry.ref), []).append(entry)
    chains = [Chain(entries[0].key, ref, tuple(entries)) for (_, ref), entries in found.items()]
    return sorted(chains, key=lambda c: (c.key.place.as_posix(), c.ref.id)), problems


def select(chains: Sequence[Chain], cell: str, topology: str) -> list[Chain]:
    """Chains whose cell and topology match shell-style patterns. Raises UsageProblem when none does."""
    matching = [
        chain
        for chain in chains
        if (fnmatch.fnmatch(chain.ref.cell, cell) or fnmatch.fnmatch(chain.ref.id, cell))
        and fnmatch.fnmatch(chain.key.topology, topology)
    ]
    if not matching:
        known = ", ".join(dict.fromkeys(chain.name for chain in chains))
        raise UsageProblem(f"no history for cell {cell!r} on topology {topology!r}; there is: {known}")
    return matching


def check_metric(name: str) -> Metric:
    """The metric of an id. Raises UsageProblem for one that no history can hold."""
    metric = METRICS.get(name.rpartition(".")[2])
    if metric is None or not metric.gated:
        gated = ", ".join(row.id for row in METRICS.values() if row.gated)
        raise UsageProblem(f"--metric {name!r}: history holds gated metrics only: {gated}")
    return metric


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The newest `width` values as bars between the smallest and the largest."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high <= low:
        return BARS[3] * len(shown)
    return "".join(BARS[round((v - low) / (high - low) * (len(BARS) - 1))] for v in shown)


def change_of_last(values: Sequence[float]) -> float | None:
    """Newest value relative to the median of those before it, None for fewer than two."""
    if len(values) < 2:
        return None
    before = median(values[:-1])
    return values[-1] / before - 1 if before > 0 else None


def plot(chain: Chain, metric: str, width: int = 72, height: int = 12) -> list[str]:
    """The newest launches as points over their order; a sign stands for every verdict that is not plain."""
    points = chain.values(metric)[-width:]
    if not points:
        return [f"{metric}: no launch has it"]
    values = [value for _, value in points]
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.02 * high or 1.0
    low, high = low - margin, high + margin
    step = max(1, (width - 1) // max(1, len(points) - 1)) if len(points) > 1 else 1
    canvas = [[" "] * ((len(points) - 1) * step + 1) for _ in range(height)]
    middle = _row(median(values), low, high, height)
    canvas[middle] = ["·"] * len(canvas[middle])
    for position, (entry, value) in enumerate(points):
        canvas[_row(value, low, high, height)][position * step] = MARKS.get(entry.verdict, "●")
    labels = {0: number(high), height - 1: number(low), middle: number(median(values))}
    room = max(len(label) for label in labels.values())
    lines = [f"{labels.get(index, ''):>{room}} ┤{''.join(row)}" for index, row in enumerate(canvas)]
    first, last = (_date(points[place][0]) for place in (0, -1))
    axis = f"{first}{last:>{max(0, len(canvas[0]) - len(first))}}" if len(points) > 1 else first
    unit = METRICS[metric.rpartition(".")[2]].unit
    legend = "● plain, " + ", ".join(f"{sign} {verdict}" for verdict, sign in MARKS.items())
    return [f"{metric}, {unit}; dotted: median of these launches", *lines, " " * (room + 2) + axis, legend]


def _row(value: float, low: float, high: float, height: int) -> int:
    return height - 1 - min(height - 1, max(0, round((value - low) / (high - low) * (height - 1))))


def _date(entry: HistoryEntry) -> str:
    return f"{entry.launch.date:%Y-%m-%d}" if entry.launch else "?"


def creep_lines(chain: Chain, metric: str) -> list[str]:
    """Lasting steps that single nights could not show, in words; says so when it cannot look."""
    points = series_of(chain.entries, chain.key, chain.ref, metric)
    try:
        creep = find_creep(points, METRICS[metric.rpartition(".")[2]].direction)
    except UsageProblem as problem:
        return [f"creep: not looked for: {problem}"]
    if creep.note:
        return [f"creep: {creep.note}"]
    if not creep.steps:
        return [f"creep: none in {creep.points} launches"]
    total = f"; in all {creep.total:+.1%} (+ is worse)" if creep.total is not None else ""
    return [*(f"creep: {step.line()}" for step in creep.steps), f"creep: {len(creep.steps)} steps{total}"]
