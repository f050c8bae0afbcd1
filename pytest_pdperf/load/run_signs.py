"""What a whole run shows that a single request cannot: chat templates' constant overhead and the delayed-ACK
stall.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from pytest_pdperf.measure.records import RequestRecord, Status

from .exchange import Exchange

DELAYED_ACK_MS = (38.0, 56.0)
"""Linux waits 40 ms before it acknowledges a small segment on its own; 42-52 ms were seen through
sglang-router.
"""


def nagle_warning(exchanges: Sequence[Exchange], quick_ack: bool) -> list[str]:
    """Name the stall of a server that leaves Nagle's algorithm on, seen as about 40 ms between head and first
    data.

    The server holds its second small segment until the first is acknowledged, the client's kernel delays that
    on a kept-alive connection. Looks for it on most re-used connections, in a narrow band, and not on fresh
    ones.
    """
    reused = [gap for e in exchanges if e.reused and (gap := _head_to_data_ms(e)) is not None]
    fresh = [gap for e in exchanges if not e.reused and (gap := _head_to_data_ms(e)) is not None]
    low, high = DELAYED_ACK_MS
    hit = [gap for gap in reused if low <= gap <= high]
    if len(hit) < 3 or len(hit) < 0.5 * len(reused):
        return []
    if fresh and low <= median(fresh) <= high:
        return []
    policy = "although TCP_QUICKACK was armed" if quick_ack else "quick_ack=False leaves the ACK delayed"
    return [
        f"delayed-ACK stall: on {len(hit)} of {len(reused)} kept-alive requests the first data came "
        f"{median(hit):.0f} ms after the response head, as a server or router without TCP_NODELAY does; "
        f"TTFT holds this constant ({policy})"
    ]


def _head_to_data_ms(exchange: Exchange) -> float | None:
    if not exchange.head_ns or len(exchange.marks) < 3 or exchange.status != 200:
        return None
    return (exchange.marks[1] - exchange.head_ns) / 1e6


def settle_chat(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Judge prompt lengths where a template adds tokens: the surplus must be one constant over the whole run.

    Another surplus than the commonest means that text did not keep its planned length.
    """
    surplus = Counter(
        r.prompt_tokens - r.planned_input_tokens
        for r in records
        if r.status is Status.OK and r.prompt_tokens is not None
    )
    if not surplus:
        return list(records)
    usual = surplus.most_common(1)[0][0]
    return [_judged(r, usual) for r in records]


def _judged(record: RequestRecord, usual: int) -> RequestRecord:
    if record.status is not Status.OK or record.prompt_tokens is None:
        return record
    want = record.planned_input_tokens + usual
    if record.prompt_tokens == want and usual >= 0:
        return record
    return replace(
        record,
        status=Status.WRONG_PROMPT_LENGTH,
        error=f"server counted {record.prompt_tokens} prompt tokens, planned {record.planned_input_tokens} "
        f"plus a constant {usual} of the chat template",
    )
