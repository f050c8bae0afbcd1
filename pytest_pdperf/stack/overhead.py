"""What the router adds to a request: the same request through it and past it, in turn, while nothing else runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from pytest_pdperf.spec.topology import Kind, Role

from .greedy import Answer, ask, body_of, client
from .pairs import TOKENS, _length, direct_request, prompt
from .plan import LaunchPlan

ROUNDS = 8
"""Requests each way; the first of either warms both ways and is not counted."""
_FIRST_PROMPT = 5_000
"""Numbers of prompts that no warm-up used."""


@dataclass(frozen=True, slots=True)
class RouterOverhead:
    """Median times of a short request, ms. `added_ms` is None when it could not be measured; `reason` says why."""

    added_ms: float | None
    through_ms: float | None = None
    direct_ms: float | None = None
    requests: int = 0
    """Counted requests each way."""
    reason: str = ""
    direct_mean_ms: float | None = None
    """Mean of the requests past the router: to hold against the engines' own means over the same requests."""


class _Failed(Exception):
    pass


def measure_router_overhead(
    plan: LaunchPlan,
    *,
    mark: Callable[[], None] = lambda: None,
    rounds: int = ROUNDS,
    timeout_s: float = 30.0,
    clock: Callable[[], float] = time.perf_counter,
) -> RouterOverhead:
    """Time short requests through the router and past it, in turn. Needs an idle stack; never raises for a server.

    Past the router means what it does itself: one engine when aggregated, both legs of a pair when disaggregated.
    `mark` is called right before the first counted request and after the last: the place to read counters.
    Every request has a connection of its own: on a kept one, a client that delays its ACKs gets each answer of
    sglang-router 40 ms late (Nagle's algorithm there), which no measured cell suffers, as the load client does not.
    The difference holds the router's own work and one more hop; where it is below the noise it may be negative.
    """
    if plan.router is None:
        return RouterOverhead(None, reason="there is no router")
    through: list[float] = []
    direct: list[float] = []
    try:
        with client(timeout_s, keep_alive=False) as http:

            def checked(what: str, request: Callable[[], Answer]) -> Answer:
                answer = request()
                if answer.error:
                    raise _Failed(f"{what}: {answer.error}")
                return answer

            def one(url: str, number: int) -> None:
                form = next(f for f in ("token_ids", "generate_ids", "text") if f in plan.prompt_forms())
                path, body = body_of(
                    plan.served_model, prompt(number, _length(plan)), TOKENS, form=form, stream=True
                )
                checked(url, lambda: ask(http, url, path, body, want=TOKENS, timeout_s=timeout_s))

            def past(number: int) -> None:
                if plan.topology.kind is Kind.AGGREGATED:
                    one(plan.instances[0].url, number)
                    return
                prefill, decode = plan.of_role(Role.PREFILL)[0], plan.of_role(Role.DECODE)[0]
                if not direct_request(plan, prefill, decode, number, http, checked, timeout_s=timeout_s):
                    raise _Failed("this engine's roles cannot be asked past the router")

            for turn in range(rounds + 1):
                if turn == 1:
                    mark()
                for times, send in ((through, lambda n: one(plan.url, n)), (direct, past)):
                    number = _FIRST_PROMPT + 2 * turn + (times is direct)
                    start = clock()
                    send(number)
                    if turn:
                        times.append((clock() - start) * 1000.0)
            mark()
    except _Failed as problem:
        return RouterOverhead(None, reason=str(problem))
    a, b = median(through), median(direct)
    return RouterOverhead(a - b, a, b, rounds, direct_mean_ms=fmean(direct))
