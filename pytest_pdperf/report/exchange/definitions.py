"""A run's numbers under another tool's definitions, so that two reports of one system can be brought together.

The stamps are ours in both columns: what still differs from the other tool's own report is its client.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_pdperf.measure.alternatives import populations, recompute
from pytest_pdperf.measure.table import METRICS

from .chosen import Chosen

_STATISTICS = {"mean": "mean", "median": "p50", "p95": "p95", "p99": "p99"}
_RATES = {"output_throughput": "output_tps_wall", "request_throughput": "request_rate"}


@dataclass(frozen=True, slots=True)
class DefinitionRow:
    """One number of the other tool, recomputed, and ours of the same name or kind."""

    name: str
    """As the tool calls it."""
    value: float | None
    n: int
    unit: str
    definition: str
    ours: str
    """Id of our metric with that definition, empty when there is none."""
    our_value: float | None

    @property
    def change(self) -> float | None:
        """(theirs - ours) / ours, None where there is nothing to compare."""
        if self.value is None or not self.our_value:
            return None
        return (self.value - self.our_value) / self.our_value


@dataclass(frozen=True, slots=True)
class DefinitionTable:
    """All rows of one stream of one cell."""

    name: str
    invalid: bool
    rows: tuple[DefinitionRow, ...]


def definition_tables(chosen: Chosen, tool: str) -> Iterator[DefinitionTable]:
    """A table a stream; none when the cell has no records. Raises UsageProblem for a tool that is not known."""
    populations(tool)
    for stream, records in chosen.streams():
        if records is None:
            return
        result = chosen.outcome.result
        ours = result.streams[stream] if stream else result.metrics
        computed = recompute(records, tool)
        rows = []
        for population in populations(tool):
            for name, statistic in _STATISTICS.items():
                value = computed[f"{name}_{population.name}"]
                key = f"{population.ours}_{statistic}" if population.ours else ""
                key = key if key in METRICS else ""
                known = ours[key].value if key in ours else None
                rows.append(
                    DefinitionRow(
                        f"{name}_{population.name}",
                        value.value,
                        value.n,
                        "ms",
                        population.definition,
                        key,
                        known,
                    )
                )
        for name, key in _RATES.items():
            value = computed[name]
            known = ours[key].value if key in ours else None
            rows.append(DefinitionRow(name, value.value, value.n, METRICS[key].unit, value.note, key, known))
        label = f"{chosen.name}/{stream}" if stream else chosen.name
        yield DefinitionTable(label, bool(result.invalid), tuple(rows))
