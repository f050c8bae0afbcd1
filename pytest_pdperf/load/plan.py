"""The full list of requests of a cell, decided before anything is sent: prompts, lengths and send times."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.trace import read_trace
from pytest_pdperf.spec.workload import Cell, ClosedLoop, OpenLoop, Stream, TraceReplay

from .arrivals import send_times
from .planned import Planned, StreamPlan
from .prompts import check_context, generator, prompts_for, trace_prompt
from .target import Target


def plan_cell(cell: Cell, target: Target, *, seed: int, salt: str) -> tuple[StreamPlan, ...]:
    """Everything a run of `cell` will send. Pure but for reading a trace file.

    `salt` must name the run and must not name the topology. It decides what prompts say, so that no cache knows
    them; how long they are and when they are sent depends on seed and cell alone and is the same in every run, or
    a night with longer bursts would look like a regression. Warm-up prompts come from their own salt, so none of
    them is ever measured. Raises UsageProblem for a request that cannot fit the server's context or a bad
    trace.
    """
    plans = tuple(
        _plan_stream(stream, target, seed, f"{cell.workload}/{cell.id}", salt, _share(cell, i))
        for i, stream in enumerate(cell.streams)
    )
    longest = max(len(r.prompt) + r.output_tokens for p in plans for r in p.requests + p.warmups)
    check_context(cell, target.max_context, longest if _has_trace(cell) else None)
    return plans


def lengths_of(stream: Stream, rng: np.random.Generator) -> list[int]:
    """Prompt lengths of a stream, one a request, drawn uniformly from its range (both ends included)."""
    low, high = stream.input_tokens
    return [int(n) for n in rng.integers(low, high + 1, size=stream.requests)]


def _share(cell: Cell, position: int) -> int:
    """Warm-ups of one stream: dealt out in turn, so that every class is warm."""
    return len(range(position, cell.warmups, len(cell.streams)))


def _has_trace(cell: Cell) -> bool:
    return any(isinstance(s.arrival, TraceReplay) for s in cell.streams)


def _plan_stream(
    stream: Stream, target: Target, seed: int, place: str, salt: str, warmups: int
) -> StreamPlan:
    arrival = stream.arrival
    salt = f"{salt}/{place}"
    if isinstance(arrival, TraceReplay):
        requests = _trace_requests(stream, arrival, target, seed, salt)
        warm_lengths = [len(r.prompt) for r in requests[:1]] * warmups
    else:
        lengths = lengths_of(stream, generator("lengths", seed, place, stream.name))
        prompts = prompts_for(stream, seed=seed, salt=salt, vocab=target.vocab, lengths=lengths)
        times: tuple[float | None, ...] = (None,) * len(prompts)
        if isinstance(arrival, OpenLoop):
            times = send_times(arrival, len(prompts), generator("arrivals", seed, place, stream.name))
        requests = tuple(Planned(p, stream.output_tokens, t) for p, t in zip(prompts, times, strict=True))
        warm_lengths = [stream.input_tokens[1]] * warmups
    warm = prompts_for(stream, seed=seed, salt=f"{salt}/warmup", vocab=target.vocab, lengths=warm_lengths)
    return StreamPlan(
        name=stream.name,
        requests=requests,
        warmups=tuple(Planned(p, requests[0].output_tokens) for p in warm),
        concurrency=min(arrival.concurrency, len(requests)) if isinstance(arrival, ClosedLoop) else None,
        think_s=arrival.think_s if isinstance(arrival, ClosedLoop) else 0.0,
    )


def _trace_requests(
    stream: Stream, arrival: TraceReplay, target: Target, seed: int, salt: str
) -> tuple[Planned, ...]:
    """The trace's requests, the first due at 0; `speed` divides the times between them."""
    rows = read_trace(Path(arrival.path), limit=stream.requests)
    if len(rows) < stream.requests:
        raise UsageProblem(
            f"{arrival.path}: {stream.requests} requests asked for, the trace has {len(rows)}; lower `requests`"
        )
    fresh = prompts_for(
        stream, seed=seed, salt=salt, vocab=target.vocab, lengths=[row.input_tokens for row in rows]
    )
    return tuple(
        Planned(
            trace_prompt(row, seed=seed, salt=salt, vocab=target.vocab) if row.hash_ids else prompt,
            row.output_tokens,
            (row.at_s - rows[0].at_s) / arrival.speed,
        )
        for row, prompt in zip(rows, fresh, strict=True)
    )
