"""Requests made ready before the clock starts: bytes for the wire, and the exchange that will hold the answer."""

from __future__ import annotations

from collections.abc import Iterable

from .bodies import body_of, http_request
from .exchange import Exchange
from .job import Job
from .planned import StreamPlan


def exchanges_of(
    job: Job,
    stream: StreamPlan,
    positions: Iterable[int],
    headers: tuple[tuple[str, str], ...],
    *,
    warmup: bool = False,
) -> dict[int, Exchange]:
    """Position -> exchange of the requests (or warm-ups) of a stream at these positions."""
    planned = stream.warmups if warmup else stream.requests
    made = {}
    for index in positions:
        request = planned[index]
        request_id = f"{job.run_id}-{stream.name}-{'w' if warmup else ''}{index}"
        made[index] = Exchange(
            stream=stream.name,
            index=index,
            warmup=warmup,
            input_tokens=len(request.prompt),
            output_tokens=request.output_tokens,
            request_id=request_id,
            payload=http_request(body_of(request, job.target), job.target, request_id, headers),
        )
    return made
