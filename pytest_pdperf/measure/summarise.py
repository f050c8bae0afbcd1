"""From the records of a cell to its metrics. Pure: same records in, same result out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pytest_pdperf.spec.workload import Cell, ClosedLoop, Slo, Stream

from .cell_result import CellResult, MetricValue
from .records import CellRecords, RequestRecord, Status
from .samples import (
    MS,
    e2e_ms,
    gaps_ms,
    itl_per_token_ms,
    percentile,
    pooled,
    stalls_ms,
    streamed,
    successes,
    tokens_of,
    tpot_adjusted_ms,
    tpot_ms,
    ttft_from_schedule_ms,
    ttft_ms,
)
from .table import METRICS
from .validity import invalid_reasons, timing_reasons, warnings_of
from .window import end_of, steady_window, tokens_within, wall

ERRORS_SHOWN = 20
STRAGGLER = 1.1
"""One request that stretches the wall time by this factor makes wall throughput its own property ..."""
STRAGGLER_SLOW = 2.0
"""... if it also took this many times the median; the last of few requests stretches it without being slow."""


def summarise(records: CellRecords, cell: Cell, topology: str, *, shared_cores: bool = False) -> CellResult:
    """Every metric of the table for every stream, validity and warnings.

    `shared_cores` says that the client had to share its cores with the engines, as on a CPU-only machine: a client
    that could not keep up then makes the cell inconclusive, where it otherwise makes it invalid.

    The main stream's metrics carry bare ids; those of the others are there as `<stream>.<id>` and in
    `streams`.
    """
    measured = [r for r in records.requests if not r.warmup]
    by_stream = {s.name: [r for r in measured if r.stream == s.name] for s in cell.streams}
    streams = {
        stream.name: stream_metrics(by_stream[stream.name], stream, cell.slo, records.stamp_source)
        for stream in cell.streams
    }
    metrics = dict(streams[cell.main.name])
    for name, values in streams.items():
        if name != cell.main.name:
            metrics |= {f"{name}.{metric}": value for metric, value in values.items()}
    lag = _lag_ms(measured)
    main = by_stream[cell.main.name]
    window = steady_window(main, _clients(cell.main, main)) if main else None
    good = successes(measured)
    doubts = timing_reasons(records, cell, by_stream, lag)
    return CellResult(
        topology=topology,
        workload=cell.workload,
        cell=cell.id,
        metrics=metrics,
        requests=len(measured),
        ok=len(good),
        streams=streams if len(streams) > 1 else {},
        status_counts={status.value: n for status, n in Counter(r.status for r in measured).most_common()},
        errors=dict(Counter(r.error for r in measured if r.error).most_common(ERRORS_SHOWN)),
        prompt_tokens=sum(r.prompt_tokens or 0 for r in measured),
        prompt_tokens_each=_each([r.prompt_tokens for r in measured if r.prompt_tokens is not None]),
        completion_tokens=sum(tokens_of(r) for r in measured),
        stamp_source=records.stamp_source,
        client_lag_ms={"p50": percentile(lag, 50), "p99": percentile(lag, 99), "max": _max(lag)},
        steady_window_s=window.seconds if window is not None and not window.note else None,
        wall_s=wall(measured).seconds if measured else None,
        reached_concurrency=dict(records.reached_concurrency),
        max_in_flight=records.max_in_flight,
        client_cpu_s=records.client_cpu_s,
        client_processes=records.client_processes,
        client_cores=records.client_cores,
        invalid=invalid_reasons(cell, by_stream) + (() if shared_cores else doubts),
        inconclusive=doubts if shared_cores else (),
        warnings=(*records.warnings, *warnings_of(records, cell, by_stream, metrics)),
    )


def stream_metrics(
    requests: Sequence[RequestRecord], stream: Stream, slo: Slo, stamp_source: str
) -> dict[str, MetricValue]:
    """All metrics of one stream's measured requests, in the table's order. Failures enter no latency."""
    good = successes(requests)
    seen = streamed(good)
    hidden = len(good) - len(seen)
    note = f"{hidden} requests arrived in one piece, their token times are unknown" if hidden else ""
    gaps = pooled([gaps_ms(r) for r in seen])
    per_token = [itl_per_token_ms(r) for r in seen]
    samples: dict[str, NDArray[np.float64]] = {
        "ttft_ms": _array([ttft_ms(r) for r in seen]),
        "tpot_ms": _array([tpot_ms(r) for r in seen]),
        "tpot_adjusted_ms": _array([tpot_adjusted_ms(r) for r in seen]),
        "itl_ms": gaps,
        "itl_per_token_ms": pooled([g for g in per_token if g is not None]),
        "e2e_ms": _array([e2e_ms(r) for r in good]),
        "ttft_from_schedule_ms": _array([ttft_from_schedule_ms(r) for r in seen]),
        "send_lag_ms": _array(
            [(r.sent_ns - r.scheduled_ns) / MS for r in requests if r.scheduled_ns is not None]
        ),
        "client_lag_ms": _lag_ms(requests) if stamp_source == "kernel" else np.zeros(0),
    }
    notes = dict.fromkeys(
        ("ttft_ms", "tpot_ms", "tpot_adjusted_ms", "itl_ms", "itl_per_token_ms", "ttft_from_schedule_ms"),
        note,
    )
    unknown = sum(g is None for g in per_token)
    if unknown:
        notes["itl_per_token_ms"] = _join(note, f"{unknown} requests do not say how many tokens an event has")
    values = {metric: _distribution(metric, samples, notes) for metric in METRICS if _stem(metric) in samples}
    values |= _stalls(gaps, note)
    values |= _rates(requests, good, stream)
    values |= _goodput(requests, good, slo)
    return {metric: values[metric] for metric in METRICS}


def _stem(metric: str) -> str:
    return metric.rpartition("_")[0]


def _distribution(metric: str, samples: dict[str, NDArray[np.float64]], notes: dict[str, str]) -> MetricValue:
    """Percentile, mean or maximum of a sample, as the metric's id says."""
    stem, _, what = metric.rpartition("_")
    values = samples[stem]
    note = notes.get(stem, "")
    if not values.size:
        return MetricValue(None, 0, _join(note, "no sample"))
    row = METRICS[metric]
    if row.percentile is not None:
        if values.size < row.min_n:
            note = _join(note, f"n={values.size} < {row.min_n}: interpolated towards the maximum")
        return MetricValue(percentile(values, row.percentile), values.size, note)
    return MetricValue(float(values.max() if what == "max" else values.mean()), values.size, note)


def _stalls(gaps: NDArray[np.float64], note: str) -> dict[str, MetricValue]:
    names = ("stall_count", "stall_total_ms", "stall_longest_ms", "zero_gap_share")
    if not gaps.size:
        return {name: MetricValue(None, 0, _join(note, "no gap between token events")) for name in names}
    stalls = stalls_ms(gaps)
    found = (float(stalls.size), float(stalls.sum()), _max(stalls) or 0.0, float((gaps == 0).mean()))
    return {name: MetricValue(value, gaps.size, note) for name, value in zip(names, found, strict=True)}


def _rates(
    requests: Sequence[RequestRecord], good: Sequence[RequestRecord], stream: Stream
) -> dict[str, MetricValue]:
    names = ("output_tps", "output_tps_wall", "input_tps_wall", "request_rate")
    if not good or wall(requests).seconds <= 0:
        return {name: MetricValue(None, 0, "no successful request") for name in names}
    whole = wall(requests)
    window = steady_window(requests, _clients(stream, requests))
    count = len(good)
    straggler = _straggler(requests)
    return {
        "output_tps": MetricValue(tokens_within(good, window) / window.seconds, count, window.note),
        "output_tps_wall": MetricValue(sum(tokens_of(r) for r in good) / whole.seconds, count, straggler),
        "input_tps_wall": MetricValue(
            sum(r.prompt_tokens or r.planned_input_tokens for r in good) / whole.seconds, count, straggler
        ),
        "request_rate": MetricValue(count / whole.seconds, count, straggler),
    }


def _straggler(requests: Sequence[RequestRecord]) -> str:
    """Note when the wall time would be much shorter but for one slow request: the one that ended last."""
    if len(requests) < 3:
        return ""
    *rest, last = sorted(requests, key=end_of)
    start = min(r.sent_ns for r in requests)
    factor = (end_of(last) - start) / max(1, end_of(rest[-1]) - start)
    usual = float(np.median([end_of(r) - r.sent_ns for r in rest]))
    if factor <= STRAGGLER or end_of(last) - last.sent_ns <= STRAGGLER_SLOW * usual:
        return ""
    return f"one straggler stretches the wall time {factor:.2f} x"


def _goodput(
    requests: Sequence[RequestRecord], good: Sequence[RequestRecord], slo: Slo
) -> dict[str, MetricValue]:
    names = ("goodput_share", "goodput_rps")
    if slo == Slo():
        return {name: MetricValue(None, 0, "the workload has no SLO") for name in names}
    whole = wall(requests).seconds if requests else 0.0
    if whole <= 0:
        return {name: MetricValue(None, 0, "no request") for name in names}
    kept = sum(_keeps(r, slo) for r in good)
    return {
        "goodput_share": MetricValue(kept / len(requests), len(requests)),
        "goodput_rps": MetricValue(kept / whole, len(requests)),
    }


def _keeps(request: RequestRecord, slo: Slo) -> bool:
    """A bound on something that was not observed is not kept; TPOT of one token has nothing to break."""
    first = None if request.not_streamed else ttft_ms(request)
    token = None if request.not_streamed else tpot_ms(request)
    last = e2e_ms(request)
    if slo.ttft_ms is not None and (first is None or first > slo.ttft_ms):
        return False
    if slo.e2e_ms is not None and (last is None or last > slo.e2e_ms):
        return False
    if slo.tpot_ms is None:
        return True
    return tokens_of(request) < 2 or (token is not None and token <= slo.tpot_ms)


def _clients(stream: Stream, requests: Sequence[RequestRecord]) -> int | None:
    arrival = stream.arrival
    return min(arrival.concurrency, len(requests)) if isinstance(arrival, ClosedLoop) else None


def _each(counts: Sequence[int]) -> dict[str, float]:
    if not counts:
        return {}
    return {"min": min(counts), "mean": sum(counts) / len(counts), "max": max(counts)}


def _lag_ms(requests: Sequence[RequestRecord]) -> NDArray[np.float64]:
    arrays = [np.asarray(r.event_lag_ns, dtype=np.float64) / MS for r in requests if r.status is Status.OK]
    return pooled(arrays)


def _array(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.asarray([v for v in values if v is not None], dtype=np.float64)


def _max(values: NDArray[np.float64]) -> float | None:
    return float(values.max()) if values.size else None


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
