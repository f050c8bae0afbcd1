"""How many processes a cell's client needs: one, unless one core could not send and read what the cell plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from pytest_pdperf.spec.trace import read_trace
from pytest_pdperf.spec.workload import Cell, ClosedLoop, OpenLoop, Stream

CLIENTS_A_PROCESS = 500
"""Half of the 1000 streams that one process was measured with (benchmarks/client)."""
EVENTS_A_PROCESS = 12_000.0
"""Token events a second: a rate of which one core read 99 % within 5 ms in every quiet run so far
(benchmarks/client); stamps are right beyond it."""
MOST = 64


@dataclass(frozen=True, slots=True)
class Processes:
    """A number of client processes, with its reason."""

    count: int
    why: str


def processes_for(cell: Cell, asked: int | None, cores: int) -> Processes:
    """Client processes for a cell: what was `asked` for, or, for None, what the plan of the cell calls for.

    Automatic: one for every 500 closed-loop clients or 12,000 planned token events a second of its open loops,
    whichever is more, but no more than `cores`. How fast a closed loop's server will be is not known beforehand. There
    are never more processes than clients and open-loop requests to deal out.
    """
    closed = sum(s.arrival.concurrency for s in cell.streams if isinstance(s.arrival, ClosedLoop))
    lanes = closed + sum(s.requests for s in cell.streams if not isinstance(s.arrival, ClosedLoop))
    if asked is not None:
        if asked <= lanes:
            return Processes(asked, "as asked")
        return Processes(lanes, f"{asked} asked for, {lanes} requests can be open at once")
    events = sum(_events_a_second(s) for s in cell.streams if not isinstance(s.arrival, ClosedLoop))
    want = max(1, ceil(closed / CLIENTS_A_PROCESS), ceil(events / EVENTS_A_PROCESS))
    if want == 1:
        return Processes(1, "one core is enough for what the cell plans")
    plan = f"{closed} clients" if closed / CLIENTS_A_PROCESS >= events / EVENTS_A_PROCESS else ""
    plan = plan or f"{events:,.0f} planned events/s"
    count = max(1, min(want, cores, lanes, MOST))
    if count < want:
        return Processes(count, f"{plan} call for {want}, the client has {cores} CPUs")
    return Processes(count, plan)


def explain(cells: Iterable[Cell], count: Callable[[Cell], Processes]) -> list[str]:
    """Lines for `--plan`: how many processes the cells get, and why; names of cells only where they differ."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        given = count(cell)
        text = f"{given.count} process{'es' if given.count > 1 else ''} ({given.why})"
        found.setdefault(text, []).append(cell.id)
    if len(found) == 1:
        return [f"    {text}" for text in found]
    return [f"    {text}: {', '.join(ids)}" for text, ids in found.items()]


def _events_a_second(stream: Stream) -> float:
    """Token events a second that an open loop plans at its busiest; a trace's mean."""
    if isinstance(stream.arrival, OpenLoop):
        return max(stream.arrival.rate_rps, stream.arrival.ramp_to_rps or 0.0) * stream.output_tokens
    assert not isinstance(stream.arrival, ClosedLoop)
    rows = read_trace(Path(stream.arrival.path), stream.requests)
    span = (rows[-1].at_s - rows[0].at_s) / stream.arrival.speed
    return sum(r.output_tokens for r in rows) / span if span > 0 else 0.0
