"""How long a run may take, told before it starts: measured durations where there are any, else a guess that says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_pdperf.spec.workload import Cell, ClosedLoop, OpenLoop, Stream

START_UP_S: Mapping[str, float] = {"vllm": 240.0, "sglang": 240.0, "sim": 5.0, "sim-sglang": 5.0}
"""Engine -> seconds for one bring-up with its tear-down, a guess: a model of some 30B with warm caches."""
OTHER_START_UP_S = 240.0
CELL_EXTRA_S = 3.0
"""Around each cell: load process, warm-ups, settling, evidence."""
PREFILL_TPS = 10_000.0
"""Prompt tokens a second that one request is guessed to be prefilled with."""
DECODE_TPS = 40.0
"""Output tokens a second that one request is guessed to get."""

Key = tuple[str, str, str]
"""(engine, topology, cell id)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds for a run, and how many of its cells an earlier run has measured."""

    start_up_s: float
    cells_s: float
    bring_ups: int
    cells: int
    known: int
    source: str
    """The run that the known durations come from."""

    def describe(self) -> str:
        """One line for `--plan`."""
        where = (
            f"{self.known} of {self.cells} cells as in run {self.source}, the rest" if self.known else "all"
        )
        if self.known == self.cells:
            where = f"cells as in run {self.source}; start-up"
        return (
            f"estimated time: {minutes(self.start_up_s + self.cells_s)} ({self.bring_ups} bring-ups "
            f"{minutes(self.start_up_s)}, {self.cells} cells {minutes(self.cells_s)}; {where} a rough guess)"
        )


def estimate(
    launches: Sequence[tuple[str, str]],
    cells: Sequence[Cell],
    earlier: Mapping[Key, float],
    source: str = "",
) -> Estimate:
    """Estimate a run of `cells` on every launch, given as (engine, topology).

    `earlier` has the wall seconds of cells that the run `source` measured.
    """
    start_up = sum(start_up_s(engine) for engine, _ in launches)
    total, known = 0.0, 0
    for engine, topology in launches:
        for cell in cells:
            known += (engine, topology, cell.id) in earlier
            total += cell_s(engine, topology, cell, earlier)
    return Estimate(start_up, total, len(launches), len(launches) * len(cells), known, source)


def start_up_s(engine: str) -> float:
    """Seconds of one bring-up with its tear-down, a guess."""
    return START_UP_S.get(engine, OTHER_START_UP_S)


def cell_s(engine: str, topology: str, cell: Cell, earlier: Mapping[Key, float]) -> float:
    """Seconds of one cell with what belongs to it: as measured earlier, else guessed."""
    seconds = earlier.get((engine, topology, cell.id))
    return CELL_EXTRA_S + (guess(cell) if seconds is None else seconds)


def guess(cell: Cell) -> float:
    """Seconds of a cell from its shape alone: its longest stream, or every request's deadline if that is less."""
    return max(min(_stream_s(stream), stream.requests * cell.timeout_s) for stream in cell.streams)


def _stream_s(stream: Stream) -> float:
    one = sum(stream.input_tokens) / 2 / PREFILL_TPS + stream.output_tokens / DECODE_TPS
    arrival = stream.arrival
    if isinstance(arrival, ClosedLoop):
        return -(-stream.requests // arrival.concurrency) * (one + arrival.think_s)
    if isinstance(arrival, OpenLoop):
        rate = (arrival.rate_rps + (arrival.ramp_to_rps or arrival.rate_rps)) / 2
        return stream.requests / rate + one
    return stream.requests * one


def minutes(seconds: float) -> str:
    """A duration as one reads it: seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"
