"""Decide from counted tokens whether requests really went prefill -> KV transfer -> decode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .record import Expected, Status


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over the replicas of each role; None where a replica's page did not tell."""

    prefill_requests: float | None = None
    decode_requests: float | None = None
    computed: float | None = None
    """Prompt tokens that decode prefilled itself."""
    cached: float | None = None
    """Prompt tokens from decode's own prefix cache."""
    transferred: float | None = None
    peer: float | None = None
    """The part of `transferred` that came from a peer engine or may have, where tiers are told apart."""
    transfers: float | None = None
    """Finished transfers, one for each request."""
    per_request_transfers: bool = False
    """True for engines whose decode role cannot prefill and whose transfer count is one for each request."""


@dataclass(frozen=True, slots=True)
class Path:
    """The answer: a status, how many of the expected requests are proven, and one line that says why."""

    status: Status
    proven: int | None
    detail: str


def whole_block_tail(prompts: Sequence[int], block: int) -> float:
    """Mean tokens at a prompt's end that vLLM's ExampleConnector leaves to decode, with `block` tokens a block.

    It moves whole blocks and always leaves two tokens or more (vLLM 0.32, `example_connector.py`).
    """
    return sum(n - max(0, n - 2) // block * block for n in prompts) / len(prompts) if prompts else 0.0


def judge_path(counts: Counts, expected: Expected) -> Path:
    """Status of the path for `expected.requests` requests.

    Token sources on decode are the best proof there is. HTTP 200, correct text, decode's prompt throughput
    and `cached_tokens` are no evidence and do not enter.
    """
    if expected.requests <= 0:
        return Path(Status.UNKNOWN, None, "no request was sent in the window")
    if counts.transferred is not None:
        return _by_tokens(counts, expected, counts.transferred)
    if counts.per_request_transfers and counts.transfers is not None:
        return _by_transfers(counts, expected, counts.transfers)
    return Path(Status.UNKNOWN, None, "the decode side does not tell where its prompt tokens came from")


def _by_tokens(counts: Counts, expected: Expected, transferred: float) -> Path:
    m = expected.requests
    if counts.computed is None:
        return Path(Status.UNKNOWN, None, "tokens computed on decode are not known")
    on_decode = transferred + counts.computed + (counts.cached or 0.0)
    total = max(on_decode, float(expected.prompt_tokens or 0))
    if total <= 0:
        return Path(Status.BYPASSED, 0, f"0 of {m}: decode saw no prompt token")
    if counts.peer is not None and counts.peer < transferred:
        transferred = counts.peer
    share = counts.computed / total
    if transferred <= 0:
        if counts.prefill_requests and counts.computed > 0:
            return Path(Status.RECOMPUTED, 0, f"0 of {m}: prefill worked, decode computed its prompts again")
        return Path(Status.BYPASSED, 0, f"0 of {m}: no KV was transferred (recompute share {share:.3g})")
    if counts.prefill_requests == 0:
        return Path(Status.BYPASSED, 0, f"0 of {m}: KV came from elsewhere, prefill served no request")
    tail = expected.tail_tokens * m
    n = m if transferred + tail >= total else min(m - 1, math.floor(m * transferred / total + 1e-9))
    detail = f"by tokens (recompute share {share:.3g})"
    return _limited(n, m, detail, counts)


def _by_transfers(counts: Counts, expected: Expected, transfers: float) -> Path:
    m = expected.requests
    if transfers <= 0:
        return Path(Status.BYPASSED, 0, f"0 of {m}: no KV was transferred")
    if counts.decode_requests is None:
        return Path(Status.UNKNOWN, None, "requests finished on decode are not known")
    n = min(m, math.floor(transfers))
    if counts.computed:
        return Path(Status.PARTIAL, None, f"decode computed {counts.computed:g} prompt tokens itself")
    return _limited(n, m, "by transfers", counts)


def _limited(n: int, m: int, detail: str, counts: Counts) -> Path:
    """No more requests can be proven than each role is known to have finished."""
    for role, seen in (("prefill", counts.prefill_requests), ("decode", counts.decode_requests)):
        if seen is not None and seen < n:
            n, detail = math.floor(seen), f"by requests on {role}"
    if n >= m:
        return Path(Status.PROVEN, m, f"{m} of {m}")
    if n <= 0:
        return Path(Status.BYPASSED, 0, f"0 of {m} {detail}")
    return Path(Status.PARTIAL, n, f"{n} of {m} {detail}")
