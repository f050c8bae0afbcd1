"""Drive the client in this process and look at what it wrote down, below the record level too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from pytest_pdperf.load.decode import Expect, to_record
from pytest_pdperf.load.drive import Drive, Outcome
from pytest_pdperf.load.exchange import Exchange
from pytest_pdperf.load.job import Job
from pytest_pdperf.load.planned import Planned, StreamPlan
from pytest_pdperf.load.spool import Spool
from pytest_pdperf.load.target import Target
from pytest_pdperf.measure.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Driven:
    """One drive: raw exchanges with their bodies, and the records made of them."""

    outcome: Outcome
    exchanges: tuple[Exchange, ...]
    bodies: tuple[bytes, ...]
    records: tuple[RequestRecord, ...]


LENIENT = Expect(ignore_eos=False, check_prompt=False)


def closed_plan(
    requests: int, concurrency: int = 1, *, output_tokens: int = 16, name: str = "main", think_s: float = 0.0
) -> StreamPlan:
    """A closed-loop stream of small prompts."""
    planned = tuple(Planned((1000 + i, 7, 7), output_tokens) for i in range(requests))
    return StreamPlan(name, planned, (), concurrency, think_s)


def open_plan(times: Sequence[float], *, output_tokens: int = 16, name: str = "main") -> StreamPlan:
    """An open-loop stream, due at `times` (seconds)."""
    planned = tuple(Planned((1000 + i, 7, 7), output_tokens, at) for i, at in enumerate(times))
    return StreamPlan(name, planned, (), None)


def drive(
    target: Target,
    plans: Sequence[StreamPlan],
    folder: Path,
    *,
    timeout_s: float = 10.0,
    expect: Expect = LENIENT,
) -> Driven:
    """Run plans to their end on a fresh loop."""
    job = Job(target, tuple(plans), timeout_s, "test")
    loop = uvloop.new_event_loop()
    try:
        with Spool(folder / "bodies") as spool:
            outcome = Drive(loop, job, spool).run()
            bodies = tuple(spool.get(e) for e in outcome.exchanges)
    finally:
        loop.close()
    exchanges = tuple(outcome.exchanges)
    records = tuple(to_record(e, b, target.api, expect) for e, b in zip(exchanges, bodies, strict=True))
    return Driven(outcome, exchanges, bodies, records)
