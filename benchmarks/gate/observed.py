"""What launches of real engines spread by, from the baselines and histories in this repository."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_pdperf.gate.baseline import read
from pytest_pdperf.gate.catalogue import spec_of
from pytest_pdperf.gate.fingerprint import BaselineKey
from pytest_pdperf.gate.history import read_history
from pytest_pdperf.gate.statistics import log_score, pool
from pytest_pdperf.gate.verdict import Verdict
from pytest_pdperf.measure.table import METRICS

ROOT = Path(__file__).parents[2]
RED = frozenset({Verdict.FAIL, Verdict.INVALID, Verdict.SUSPECT, Verdict.INCONCLUSIVE})


@dataclass(frozen=True)
class Reading:
    """One value of one launch, and the series that it belongs to: launches are only compared within one."""

    series: tuple[str, str, str]
    """Place and key, cell with its load, metric."""
    launch: str
    session: str
    value: float

    @property
    def metric(self) -> str:
        """Metric id."""
        return self.series[2]

    @property
    def concurrency(self) -> str:
        """`c16` of `in512-out256-c16`."""
        return self.series[1].partition("@")[0].rpartition("-")[2]


@dataclass(frozen=True)
class Spread:
    """A standard deviation of ln(value) pooled over series, with the degrees of freedom behind it."""

    sd: float
    freedom: int
    series: int


def readings(root: Path) -> list[Reading]:
    """Every launch on GPUs below `baselines/` and `history/`, each once.

    Left out are simulated engines and CPUs, whose spread says nothing of a GPU's, and whole launches in which any
    cell was red: they measured a change or a fault. What is left was called unchanged by the gate, so large chance
    deviations are missing from it and the spread is, if anything, too small.
    """
    found: dict[tuple[tuple[str, str, str], str], Reading] = {}

    def keep(place: str, cell: str, launch: str, session: str, values: Iterable[tuple[str, float]]) -> None:
        for metric, value in values:
            series = (place, cell, metric)
            found.setdefault((series, launch), Reading(series, launch, session, value))

    for path in sorted((root / "baselines").rglob("*.json")):
        if path.is_relative_to(root / "baselines" / "published"):
            continue
        file = read(path, METRICS)
        for cell, pins in file.cells.items():
            for pin in pins:
                key = file.keys[pin.key]
                if not _counts(key):
                    continue
                for one in pin.launches:
                    name = f"{cell.partition('/')[2]}@{pin.workload_digest}"
                    keep(f"{key.place} {pin.key}", name, one.id, one.session, one.values.items())
    for path in sorted((root / "history").rglob("*.jsonl")):
        entries = [entry for entry in read_history(path).entries if _counts(entry.key)]
        red = {entry.launch_id for entry in entries if entry.verdict in RED}
        for entry in entries:
            if entry.launch is None or entry.launch_id in red:
                continue
            name = f"{entry.cell}@{entry.workload_digest}"
            place = f"{entry.key.place} {entry.key.digest}"
            keep(place, name, entry.launch_id, entry.session, entry.launch.values.items())
    return list(found.values())


def _counts(key: BaselineKey) -> bool:
    return not key.simulated and not key.gpu.startswith("cpu")


def spread(rows: Iterable[Reading], *, within_session: bool = False) -> Spread | None:
    """Pool the variances of all series; `within_session`: launches of one session only. None without repeats."""
    groups: dict[tuple[object, ...], list[float]] = {}
    for row in rows:
        spec = spec_of(row.metric, METRICS)
        if spec is not None:
            key = (row.series, row.session) if within_session else (row.series,)
            groups.setdefault(key, []).append(log_score(row.value, spec.direction))
    pooled = pool(groups.values())
    if not pooled.freedom:
        return None
    return Spread(
        math.sqrt(pooled.variance), pooled.freedom, sum(len(group) > 1 for group in groups.values())
    )


def table(rows: Sequence[Reading]) -> list[str]:
    """One line a metric: pooled launch-to-launch standard deviation, by concurrency, and the prior that is shipped."""
    levels = sorted({row.concurrency for row in rows}, key=lambda text: (len(text), text))
    lines = [
        f"{'metric':<14}{'sd':>8}{'freedom':>9}{'series':>8}{'prior':>8}" + "".join(f"{c:>8}" for c in levels)
    ]
    for metric in sorted({row.metric for row in rows}):
        mine = [row for row in rows if row.metric == metric]
        every = spread(mine)
        spec = spec_of(metric, METRICS)
        if every is None or spec is None:
            lines.append(f"{metric:<14}{'-':>8}{0:>9}")
            continue
        cells = [spread(row for row in mine if row.concurrency == level) for level in levels]
        shown = "".join(f"{one.sd:>8.4f}" if one else f"{'-':>8}" for one in cells)
        lines.append(
            f"{metric:<14}{every.sd:>8.4f}{every.freedom:>9}{every.series:>8}{spec.prior_sd:>8.3f}{shown}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; without any repeated launch say so and exit with 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate.noise", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="folder that holds baselines/ and history/")
    rows = readings(parser.parse_args(arguments).root)
    launches = {(row.series[0], row.launch) for row in rows}
    print(
        f"{len(launches)} launches of {len({row.series for row in rows})} series; standard deviations of ln(value)"
    )
    if spread(rows) is None:
        print("no series was launched twice: nothing to estimate")
        return 1
    print("\n".join(table(rows)))
    return 0
