"""First requests to a deployment that is not ours: which API takes exact prompts, and do the named engines serve them.

A role URL of some other deployment prints fine metrics, none of which would be about these requests.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import httpx

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.evidence.exposition import Snapshot, Unknown
from pytest_pdperf.evidence.names import Quantity
from pytest_pdperf.evidence.readings import change
from pytest_pdperf.evidence.scrape import scrape
from pytest_pdperf.load.target import Api
from pytest_pdperf.load.words import text_of
from pytest_pdperf.spec.topology import Role
from pytest_pdperf.stack.access import KEY_VARIABLE
from pytest_pdperf.stack.greedy import Answer, ask, body_of
from pytest_pdperf.stack.pairs import prompt

from .deployment import Deployment

REQUEST_S = 180.0
"""Deadline of a first request: it may pay for a handshake, or for a replica that wakes up."""
COUNTED_S = 30.0
"""How long after the requests the engines' counters are awaited."""
MOST = 16
"""Requests at most, however many replicas there are."""
TOKENS = 2
PROMPT = 160

Pages = Mapping[str, Snapshot | Unknown]


@dataclass(frozen=True, slots=True)
class Greeting:
    """How the deployment wants to be asked, and what the first requests showed."""

    api: Api
    requests: int
    notes: tuple[str, ...] = ()


def greet(
    deployment: Deployment,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    counted_s: float = COUNTED_S,
) -> Greeting:
    """Send first requests through the target. Raises UsageProblem when it takes none, or when a role did not serve."""
    named = deployment.named
    before = scrape(named.urls, access=named.access)
    with named.access.client(REQUEST_S) as http:
        api = _api(http, deployment)
        replicas = max((named.count(role) for role in Role), default=0)
        count = min(MOST, 2 * replicas) if replicas else 0
        for _ in range(count):
            answer = _ask(http, deployment, api)
            if answer.error:
                raise UsageProblem(
                    f"--target {named.url}: a request failed: {named.access.masked(answer.error)}"
                )
    if not named.engines:
        return Greeting(api, count + 1)
    until = clock() + counted_s
    while True:
        after = scrape(named.urls, access=named.access)
        idle = _idle_roles(deployment, before, after)
        if not idle:
            break
        if clock() > until:
            role = idle[0]
            urls = ", ".join(url for own, url in named.engines.values() if own is role)
            raise UsageProblem(
                f"--target-role {role.value}={urls}: none of the {count + 1} requests through the target was counted "
                "there; is it an engine of another deployment?"
            )
        sleep(0.25)
    _refuse_swapped(deployment, before, after)
    return Greeting(api, count + 1)


def _api(http: httpx.Client, deployment: Deployment) -> Api:
    """The first way that takes a prompt of exact length, or the one that the user wants. Raises UsageProblem."""
    named = deployment.named
    wanted: Sequence[Api]
    if named.api in ("completions", "generate", "chat"):
        wanted = (named.api,)  # type: ignore[assignment]
    else:
        wanted = ("generate", "completions") if "sglang" in deployment.engine else ("completions", "generate")
    errors = []
    for api in wanted:
        answer = _ask(http, deployment, api)
        if not answer.error:
            return api
        error = named.access.masked(answer.error)
        if any(f"HTTP {status}" in error for status in (401, 403)):
            key = named.access.key_env
            way = f"it refuses the key in {key}" if key else f"put its API key into {KEY_VARIABLE}"
            raise UsageProblem(f"--target {named.url}: {error}: {way}")
        errors.append(f"{api}: {error}")
    also = (
        "" if named.api != "auto" else "; --target-api chat asks with text, whose length the server decides"
    )
    raise UsageProblem(
        f"--target {named.url}: serves no request for exact lengths: {'; '.join(errors)}{also}"
    )


def _ask(http: httpx.Client, deployment: Deployment, api: Api) -> Answer:
    ids = prompt(secrets.randbelow(1 << 20), min(PROMPT, (deployment.max_context or 2 * PROMPT) - TOKENS - 1))
    if api == "chat":
        path, body = "/v1/chat/completions", _chat(deployment.model, ids)
    else:
        form = "generate_ids" if api == "generate" else "token_ids"
        path, body = body_of(deployment.model, ids, TOKENS, form=form, stream=True)
        body.pop("return_token_ids", None)  # vLLM's own: a strict front door refuses what it does not know
    return ask(http, deployment.named.url, path, body, want=TOKENS, timeout_s=REQUEST_S)


def _chat(model: str, ids: Sequence[int]) -> dict[str, object]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": text_of(ids)}],
        "max_tokens": TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _changed(
    deployment: Deployment, before: Pages, after: Pages, role: Role, quantity: Quantity
) -> float | None:
    """Sum over the engines of a role; None when one of them does not tell."""
    total = 0.0
    for name in (name for name, own in deployment.named.roles.items() if own is role):
        first, last = before[name], after[name]
        if isinstance(first, Unknown) or isinstance(last, Unknown):
            return None
        value = change(first, last, quantity)
        if isinstance(value, Unknown):
            return None
        total += value
    return total


def _idle_roles(deployment: Deployment, before: Pages, after: Pages) -> list[Role]:
    """Roles whose engines are known to have finished nothing."""
    roles = dict.fromkeys(deployment.named.roles.values())
    return [
        role for role in roles if _changed(deployment, before, after, role, Quantity.REQUESTS_FINISHED) == 0
    ]


def _refuse_swapped(deployment: Deployment, before: Pages, after: Pages) -> None:
    def got(role: Role) -> float | None:
        return _changed(deployment, before, after, role, Quantity.PROMPT_TOKENS_TRANSFERRED)

    if got(Role.PREFILL) and got(Role.DECODE) == 0:
        raise UsageProblem(
            "--target-role: the engine called prefill received KV and the one called decode none: are they mixed up?"
        )
