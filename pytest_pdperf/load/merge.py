"""One record of a cell from the parts of several client processes: as if one had sent it all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pytest_pdperf.measure.records import CellRecords, RequestRecord

from .planned import StreamPlan


def merge(parts: Sequence[CellRecords], plans: Sequence[StreamPlan]) -> CellRecords:
    """All requests in the order in which one process stores them, and what is known of the clock over all parts.

    Raises ValueError when a planned request is there twice or not at all.
    """
    place = {plan.name: i for i, plan in enumerate(plans)}
    requests = sorted(
        (r for part in parts for r in part.requests), key=lambda r: (not r.warmup, place[r.stream], r.index)
    )
    _check_whole(requests, plans)
    measured = [r for r in requests if not r.warmup]
    return CellRecords(
        requests=tuple(requests),
        stamp_source="kernel" if all(part.stamp_source == "kernel" for part in parts) else "user",
        started_ns=min(part.started_ns for part in parts),
        ended_ns=max(part.ended_ns for part in parts),
        max_in_flight=most_in_flight(measured),
        reached_concurrency={
            plan.name: most_in_flight(r for r in measured if r.stream == plan.name) for plan in plans
        },
        client_cpu_s=sum(part.client_cpu_s for part in parts),
        merged_segments=sum(part.merged_segments for part in parts),
        clock_step_ms=max((part.clock_step_ms for part in parts), key=abs),
        warnings=tuple(_told(parts)),
        client_processes=len(parts),
        client_cores=parts[0].client_cores,
    )


def most_in_flight(requests: Iterable[RequestRecord]) -> int:
    """Largest number of requests open at once, each from its sending to its end.

    The processes share one clock. One that ends when another is sent makes room for it.
    """
    steps: list[tuple[int, int]] = []
    for r in requests:
        if r.end_ns is not None and r.end_ns > r.sent_ns:
            steps += [(r.sent_ns, 1), (r.end_ns, -1)]
    running = most = 0
    for _, step in sorted(steps):
        running += step
        most = max(most, running)
    return most


def _check_whole(requests: Sequence[RequestRecord], plans: Sequence[StreamPlan]) -> None:
    found = Counter((r.stream, r.index, r.warmup) for r in requests)
    for plan in plans:
        for warmup, wanted in ((True, plan.warmups), (False, plan.requests)):
            for index in range(len(wanted)):
                times = found.pop((plan.name, index, warmup), 0)
                if times != 1:
                    name = f"{plan.name}[{'warm-up ' if warmup else ''}{index}]"
                    raise ValueError(f"the client processes sent request {name} {times} times, not once")
    if found:
        raise ValueError(f"the client processes sent a request that nobody planned: {next(iter(found))}")


def _told(parts: Sequence[CellRecords]) -> Iterable[str]:
    """Every warning once; one that not all processes gave says whose it is."""
    for warning in dict.fromkeys(w for part in parts for w in part.warnings):
        givers = [i for i, part in enumerate(parts, 1) if warning in part.warnings]
        if len(givers) == len(parts):
            yield warning
        else:
            yield f"client process {', '.join(map(str, givers))} of {len(parts)}: {warning}"
