"""Validity before performance: when a cell's numbers may not be read at all, and what its reader must be
told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pytest_pdperf.spec.workload import Cell, ClosedLoop

from .cell_result import MetricValue
from .records import CellRecords, RequestRecord, Status
from .samples import MS, gaps_ms, percentile, pooled, streamed, successes, tokens_of, ttft_ms
from .window import mean_concurrency, steady_window, wall

LAG_FLOOR_MS = 1.0
LAG_SHARE = 0.1
"""Of the median gap: user-space stamps that are later than this blur what they measure."""
SEND_LAG_MS = 5.0
KEPT_CONCURRENCY = 0.9
"""Mean requests in flight inside the steady window / clients, below which the client was the bottleneck."""
SHORTEST_WALL_S = 0.05
OUTLIER = 20.0
COLD_MS = 1000.0
"""What a first connection between two engines costs at least before it is told from an uneven start."""
FOREIGN_TOKENS, FOREIGN_RATIO = 256, 1.5
"""A chat template adds at most so many tokens; beyond that ratio the server's tokenizer is not the planned one."""
MERGED_SHARES = ((299, 0.005), (0, 0.025))
"""(token events, share of them): beyond that share merged segments can move the highest percentile that is gated for so
many events, the p99 from 299 on and the p95 below."""


def invalid_reasons(cell: Cell, by_stream: Mapping[str, Sequence[RequestRecord]]) -> tuple[str, ...]:
    """Why nothing may be concluded from this cell's requests; empty when they are good. One line a reason."""
    reasons = []
    for stream in cell.streams:
        requests = by_stream[stream.name]
        reasons += _failures(requests, stream.name if len(cell.streams) > 1 else "")
        if not requests:
            reasons.append(f"stream {stream.name!r}: no request was measured")
    measured = [r for requests in by_stream.values() for r in requests]
    if measured and wall(measured).seconds < SHORTEST_WALL_S:
        reasons.append(
            f"measured for {wall(measured).seconds * 1e3:.1f} ms only, want {SHORTEST_WALL_S * 1e3:.0f} ms"
        )
    return tuple(reasons)


def timing_reasons(
    records: CellRecords,
    cell: Cell,
    by_stream: Mapping[str, Sequence[RequestRecord]],
    lag: NDArray[np.float64],
) -> tuple[str, ...]:
    """Why nothing may be concluded from this cell's times: the client could not keep up. One line a reason."""
    reasons = []
    for stream in cell.streams:
        if requests := by_stream[stream.name]:
            reasons += _client_bound(records, requests, cell, stream.name)
    measured = [r for requests in by_stream.values() for r in requests]
    late = percentile(lag, 99)
    bound = _lag_bound(measured)
    if records.stamp_source != "kernel" and late is not None and late > bound:
        reasons.append(f"client lag p99 {late:.2f} ms over {bound:.2f} ms with user-space receive times")
    if records.clock_step_ms:
        reasons.append(
            f"the system clock was set {records.clock_step_ms:+.1f} ms during the run: times across it are wrong"
        )
    events = sum(len(r.event_ns) for r in measured)
    share = next(share for least, share in MERGED_SHARES if events >= least)
    if records.merged_segments > share * events:
        reasons.append(
            f"{records.merged_segments} segments for {events} events lost their own receive time: the client got too "
            "little CPU and the kernel merged them"
        )
    return tuple(reasons)


def _failures(requests: Sequence[RequestRecord], name: str) -> list[str]:
    """One line that counts failures by status and quotes the commonest message."""
    failed = [r for r in requests if r.status is not Status.OK]
    if not failed:
        return []
    kinds = ", ".join(f"{n} {status.value}" for status, n in Counter(r.status for r in failed).most_common())
    message = Counter(r.error for r in failed if r.error).most_common(1)
    place = f"stream {name!r}: " if name else ""
    quoted = f": {message[0][0]}" if message else ""
    return [f"{place}{len(failed)} of {len(requests)} requests failed ({kinds}){quoted}"]


def _client_bound(
    records: CellRecords, requests: Sequence[RequestRecord], cell: Cell, name: str
) -> list[str]:
    """Signs that the client, not the server, set the pace."""
    stream = next(s for s in cell.streams if s.name == name)
    arrival = stream.arrival
    if not isinstance(arrival, ClosedLoop):
        lags = [(r.sent_ns - r.scheduled_ns) / MS for r in requests if r.scheduled_ns is not None]
        late = percentile(lags, 99)
        if late is not None and late > SEND_LAG_MS:
            return [f"stream {name!r}: sent p99 {late:.1f} ms behind schedule, want {SEND_LAG_MS:g} ms"]
        return []
    clients = min(arrival.concurrency, len(requests))
    reached = records.reached_concurrency.get(name)
    if reached is not None and reached < clients:
        return [f"stream {name!r}: {reached} of {clients} clients were busy at once"]
    if arrival.think_s or any(r.status is not Status.OK for r in requests):
        return []
    window = steady_window(requests, clients)
    kept = mean_concurrency(requests, window)
    if not window.note and kept < KEPT_CONCURRENCY * clients:
        return [f"stream {name!r}: {kept:.1f} requests in flight on average, {clients} were asked for"]
    return []


def _lag_bound(requests: Sequence[RequestRecord]) -> float:
    gaps = pooled([gaps_ms(r) for r in streamed(successes(requests))])
    typical = float(np.median(gaps)) if gaps.size else 0.0
    return max(LAG_FLOOR_MS, LAG_SHARE * typical)


def warnings_of(
    records: CellRecords,
    cell: Cell,
    by_stream: Mapping[str, Sequence[RequestRecord]],
    metrics: Mapping[str, MetricValue],
) -> tuple[str, ...]:
    """What leaves the numbers valid but must stand beside them. One line each."""
    lines = []
    names = [""] + [f"{s.name}." for s in cell.streams[1:]]
    for prefix in names:
        for stem in ("ttft_ms", "e2e_ms"):
            lines += _outlier(prefix, stem, metrics)
        if metrics[f"{prefix}output_tps_wall"].note:
            lines.append(f"{prefix}output_tps_wall: {metrics[f'{prefix}output_tps_wall'].note}")
    good = successes([r for requests in by_stream.values() for r in requests])
    if cold := cold_starts(good):
        waited = ", ".join(f"{ms:,.0f}" for ms in cold)
        lines.append(
            f"cold start: the first {len(cold)} requests waited {waited} ms for their first token, {OUTLIER:g} x what "
            "the others did: engines met for the first time inside the cell; warm every prefill-decode pair and "
            "repeat it"
        )
    lines += _foreign_tokenizer(good)
    unsaid = sum(r.prompt_tokens is None for r in good)
    if unsaid:
        lines.append(f"{unsaid} answers have no prompt token count: their prompt lengths are unverified")
    hidden = sum(r.not_streamed for r in good)
    if hidden:
        lines.append(f"{hidden} answers arrived in one piece: something between buffers the stream")
    lines += _counts(good)
    if records.merged_segments:
        lines.append(f"{records.merged_segments} segments lost their own receive time: the client read late")
    return tuple(lines)


def cold_starts(requests: Sequence[RequestRecord]) -> tuple[float, ...]:
    """TTFT in ms of the requests at the start that paid for connections, in the order in which they were sent.

    Connections between engines are made when they are first used (NIXL: up to 38 s), so the first request of each
    pair waits for them. Such a request took OUTLIER times the median of those behind it, and COLD_MS more; only an
    unbroken run from the very first request on, and no more than half of all, is a start.
    """
    sent = sorted(streamed(requests), key=lambda r: r.sent_ns)
    times = [time for r in sent if (time := ttft_ms(r)) is not None]
    for count in range(len(times) // 2, 0, -1):
        usual = float(np.median(times[count:]))
        if min(times[:count]) > max(OUTLIER * usual, usual + COLD_MS):
            return tuple(times[:count])
    return ()


def _foreign_tokenizer(good: Sequence[RequestRecord]) -> list[str]:
    """Counts that are constantly off by far more than a chat template adds are those of another tokenizer."""
    known = [(r.prompt_tokens, r.planned_input_tokens) for r in good if r.prompt_tokens is not None]
    seen, planned = sum(s for s, _ in known), sum(p for _, p in known)
    if not known or seen <= FOREIGN_RATIO * planned or seen - planned <= FOREIGN_TOKENS * len(known):
        return []
    return [
        f"the server counts {seen / len(known):,.0f} prompt tokens a request, planned were "
        f"{planned / len(known):,.0f}: another tokenizer than the prompts are made for"
    ]


def _counts(good: Sequence[RequestRecord]) -> list[str]:
    """How far token counts can be trusted and what a gap between events stands for."""
    lines = []
    guessed = sum(r.token_count_source == "chunks" for r in good)
    if guessed:
        lines.append(f"{guessed} answers have no usage and no token ids: their events are counted as tokens")
    fewer = sum(tokens_of(r) < len(r.event_ns) for r in good)
    if fewer:
        lines.append(
            f"{fewer} answers have more events with content than tokens by the server's count: one is wrong"
        )
    several = [tokens_of(r) / len(r.event_ns) for r in good if tokens_of(r) > len(r.event_ns) > 0]
    if several:
        lines.append(
            f"{len(several)} answers bring {np.mean(several):.2g} tokens an event: "
            "itl_ms are gaps between events, tpot_ms and itl_per_token_ms are per token"
        )
    return lines


def _outlier(prefix: str, stem: str, metrics: Mapping[str, MetricValue]) -> list[str]:
    """Flag a maximum far beyond p95: the request is kept, and the cell wants repeating."""
    high = metrics[f"{prefix}{stem}_max"].value
    usual = metrics[f"{prefix}{stem}_p95"].value
    if high is None or usual is None or usual <= 0 or high <= OUTLIER * usual:
        return []
    return [f"outlier: {prefix}{stem} max {high:.0f} is over {OUTLIER:g} x p95 {usual:.0f}; repeat the cell"]
