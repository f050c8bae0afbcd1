"""Sends one real request through every prefill x decode pair, so that no first handshake lands in a
measured cell.

A router may never form some pairs: with round robin over two prefill and two decode engines both counters
move in step, and p0 always meets d0. Those pairs are reached directly, with the two legs a router would
send.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import httpx

from pytest_pdperf.engines.base import Instance
from pytest_pdperf.spec.topology import Kind, Role
from pytest_pdperf.stack.greedy import Answer, ProbeError, ask, body_of, client
from pytest_pdperf.stack.plan import LaunchPlan
from pytest_pdperf.stack.rooms import ROOMS

PROMPT_TOKENS = 160
"""More than one KV block of any engine (vLLM on a CPU: 128)."""
TOKENS = 2


@runtime_checkable
class NamesPairs(Protocol):
    """A router whose response ids tell which engines served a request."""

    def pair_of(self, response_id: str) -> tuple[str, str] | None:
        """(prefill `host:port`, decode `host:port`), None when the id does not say."""


@dataclass(frozen=True, slots=True)
class Warmth:
    """What the warm-up reached."""

    through_router: tuple[tuple[str, str], ...]
    """(prefill id, decode id) seen through the router."""
    direct: tuple[tuple[str, str], ...]
    """Pairs that the router did not form (or does not name) and that were reached directly."""
    notes: tuple[str, ...] = ()


Watched = Callable[[str, Callable[[], Answer]], Answer]
"""Runs a request while somebody watches the processes; the text names it. Raises when it failed."""


def prompt(number: int, length: int = PROMPT_TOKENS) -> list[int]:
    """Token ids that differ from prompt to prompt and exist in any vocabulary."""
    return [32 + (number * 7919 + i * (number % 89 + 1)) % 200 for i in range(length)]


def warm_up(plan: LaunchPlan, http: httpx.Client, watched: Watched, *, timeout_s: float) -> Warmth:
    """Warm every pair (pd) or every server (aggregated) and prove that the way through the router works."""
    length = _length(plan)
    number = 0

    def through(url: str, what: str) -> Answer:
        nonlocal number
        number += 1
        path, body = body_of(plan.served_model, prompt(number, length), TOKENS, form=_form(plan), stream=True)
        return watched(what, lambda: ask(http, url, path, body, want=TOKENS, timeout_s=timeout_s))

    if plan.topology.kind is Kind.AGGREGATED:
        for server in plan.instances:
            through(server.url, f"first request to {server.id}")
        if plan.router is not None:
            for _ in plan.instances:
                through(plan.url, "first requests through the router")
        return Warmth((), ())

    names = {f"{i.host}:{i.ports.http}": i.id for i in plan.instances}
    wanted = {(p.id, d.id) for p in plan.of_role(Role.PREFILL) for d in plan.of_role(Role.DECODE)}
    seen: list[tuple[str, str]] = []
    nothing_new = 0
    while len(seen) < len(wanted) and nothing_new <= 2 * len(wanted):
        answer = through(plan.url, "first requests through the router")
        found = plan.router.pair_of(answer.id) if isinstance(plan.router, NamesPairs) else None
        pair = (names.get(found[0], "?"), names.get(found[1], "?")) if found else None
        if pair is not None and pair in wanted and pair not in seen:
            seen.append(pair)
            nothing_new = 0
        else:
            nothing_new += 1
        if found is None and nothing_new >= len(wanted):
            break
    rest = sorted(wanted - set(seen))
    by_id = {i.id: i for i in plan.instances}
    direct: list[tuple[str, str]] = []
    notes: list[str] = []
    for prefill, decode in rest:
        number += 1
        if direct_request(plan, by_id[prefill], by_id[decode], number, http, watched, timeout_s=timeout_s):
            direct.append((prefill, decode))
    if seen and direct:
        shown = ", ".join(f"{p}>{d}" for p, d in direct)
        notes.append(
            f"the router never paired {shown} (policy {plan.topology.router.policy}); warmed directly"
        )
    cold = [pair for pair in rest if pair not in direct]
    if cold:
        shown = ", ".join(f"{p}>{d}" for p, d in cold)
        notes.append(f"not warmed: {shown}; the first request of such a pair pays its handshake")
    return Warmth(tuple(seen), tuple(direct), tuple(notes))


def direct_request(
    plan: LaunchPlan,
    prefill: Instance,
    decode: Instance,
    number: int,
    http: httpx.Client,
    watched: Watched,
    *,
    timeout_s: float,
) -> bool:
    """Send both legs of one request as the engine wants them; False when there is no such protocol."""
    connector = plan.topology.kv_transfer.connector if plan.topology.kv_transfer else None
    if "generate_ids" in plan.engine.supported_prompts() and connector in ("nixl", "mooncake"):
        ids = prompt(number, _length(plan))
        watched(
            f"first request from {prefill.id} to {decode.id}",
            lambda: meet_in_a_room(plan, prefill, decode, ids, TOKENS, http, timeout_s=timeout_s),
        )
        return True
    if "token_ids" not in plan.engine.supported_prompts() or connector not in ("nixl", "mooncake"):
        return False
    what = f"first request from {prefill.id} to {decode.id}"
    request_id = uuid.uuid4().hex
    headers = {"x-request-id": request_id}
    ids = prompt(number, _length(plan))
    first: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
    second: dict[str, object] = {"do_remote_decode": False, "do_remote_prefill": True}
    if connector == "nixl":
        first |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    else:
        bootstrap = f"http://{prefill.host}:{prefill.ports.bootstrap}"
        engine_id = _mooncake_engine_id(http, bootstrap)
        if engine_id is None:
            return False
        first["transfer_id"] = second["transfer_id"] = f"xfer-{request_id}"
        second |= {"remote_bootstrap_addr": bootstrap, "remote_engine_id": engine_id}

    path, body = body_of(plan.served_model, ids, 1, form="token_ids", stream=False)
    body["kv_transfer_params"] = first
    answer = watched(
        what, lambda: ask(http, prefill.url, path, body, want=1, timeout_s=timeout_s, headers=headers)
    )
    if connector == "nixl":
        if answer.kv_transfer_params is None:
            return False
        second = dict(answer.kv_transfer_params)
    path, last = body_of(plan.served_model, ids, TOKENS, form="token_ids", stream=True)
    last["kv_transfer_params"] = second
    watched(
        what, lambda: ask(http, decode.url, path, last, want=TOKENS, timeout_s=timeout_s, headers=headers)
    )
    return True


def probe_pair(
    plan: LaunchPlan,
    prefill: Instance,
    decode: Instance,
    prompt_ids: Sequence[int],
    n: int,
    *,
    timeout_s: float = 120.0,
) -> tuple[int, ...]:
    """The first `n` greedy tokens for a prompt from one pair of SGLang's roles, past the router.

    Neither role serves alone there. Raises ProbeError when the request fails or the tokens are not all named.
    """
    with client() as http:
        answer = meet_in_a_room(plan, prefill, decode, prompt_ids, n, http, timeout_s=timeout_s)
    if answer.error or len(answer.tokens) != n:
        what = answer.error or f"{len(answer.tokens)} token ids for {n} tokens"
        raise ProbeError(f"probe from {prefill.id} to {decode.id}: {what}")
    return answer.tokens


def meet_in_a_room(
    plan: LaunchPlan,
    prefill: Instance,
    decode: Instance,
    prompt_ids: Sequence[int],
    n: int,
    http: httpx.Client,
    *,
    timeout_s: float,
) -> Answer:
    """Both legs at once, as SGLang wants them: neither is answered before the other has come."""
    path, body = body_of(plan.served_model, prompt_ids, n, form="generate_ids", stream=False)
    body |= {"bootstrap_host": prefill.host, "bootstrap_port": prefill.ports.bootstrap}
    with ROOMS.live() as (room,), ThreadPoolExecutor(1) as side:
        body["bootstrap_room"] = room
        first = side.submit(ask, http, prefill.url, path, body, want=1, timeout_s=timeout_s)
        last = ask(http, decode.url, path, body, want=n, timeout_s=timeout_s)
        return first.result() if first.result().error else last


def _mooncake_engine_id(http: httpx.Client, bootstrap: str) -> str | None:
    try:
        found = http.get(f"{bootstrap}/query").json()
        return str(next(iter(found.values()))["engine_id"])
    except (httpx.HTTPError, ValueError, LookupError, AttributeError, TypeError, StopIteration):
        return None


def _form(plan: LaunchPlan) -> str:
    forms = plan.prompt_forms()
    return next(form for form in ("token_ids", "generate_ids", "text") if form in forms)


def _length(plan: LaunchPlan) -> int:
    longest = min((_max_len(i) for i in plan.instances), default=PROMPT_TOKENS * 2)
    return max(1, min(PROMPT_TOKENS, longest - TOKENS - 1))


def _max_len(instance: Instance) -> int:
    value = instance.args.get("max_model_len")
    return value if isinstance(value, int) and not isinstance(value, bool) else PROMPT_TOKENS * 2
