"""aiperf's two files: `profile_export.jsonl`, one record a request, and the summary `profile_export_aiperf.json`.

The summary of its forerunner genai-perf, `profile_export_genai_perf.json`, is laid out alike and has no version.

Metrics are objects with a unit, which is honoured; older summaries have bare numbers, whose unit nobody knows. Records
of the warm-up and of cancelled requests (code 499) share the file with the others.
Source: ai-dynamo/aiperf, docs/metrics_reference.md and docs/tutorials/working-with-profile-exports.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_pdperf.measure.samples import percentile
from pytest_pdperf.measure.table import METRICS

from .fields import MISSING, Place, count, entries, mapping, number, text_of, to_ms
from .imported import ImportedMetric, ImportedResult, metric_key

TOOL = "aiperf"
SCHEMAS = ("1",)
"""Major versions of the summary that are read."""
CANCELLED = 499

_TIMES: Mapping[str, tuple[str | None, str]] = {
    "time_to_first_token": ("ttft_ms", "first token event - send"),
    "inter_token_latency": ("tpot_ms", "(last - first token) / (N - 1), one a request"),
    "inter_chunk_latency": ("itl_ms", "gaps between events, pooled"),
    "request_latency": ("e2e_ms", "last token - send"),
    "time_to_second_token": (None, "second token event - first"),
}
_RATES: Mapping[str, tuple[str, str, tuple[str, ...], str]] = {
    "output_token_throughput": (
        "output_tps_wall",
        "tok/s",
        ("tokens/sec", "tokens/s", "tok/s"),
        "output tokens / benchmark duration",
    ),
    "request_throughput": (
        "request_rate",
        "req/s",
        ("requests/sec", "requests/s", "req/s"),
        "successful requests / benchmark duration",
    ),
}


def looks_like_record(data: Mapping[str, Any]) -> bool:
    """True for one line of profile_export.jsonl."""
    return {"metadata", "metrics"} <= set(data) and "benchmark_phase" in mapping(data, "metadata")


def looks_like_summary(data: Mapping[str, Any]) -> bool:
    """True for the summary."""
    if "aiperf_version" in data:
        return True
    return "request_latency" in data and "request_throughput" in data and "benchmarks" not in data


@dataclass(slots=True)
class _Tally:
    """Running totals over the records of a file."""

    kinds: Counter[str] = field(default_factory=Counter)
    times: dict[str, list[float]] = field(default_factory=dict)
    lengths: set[tuple[float | None, float | None]] = field(default_factory=set)
    errors: Counter[str] = field(default_factory=Counter)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


def read_records(rows: Iterable[tuple[Place, dict[str, Any]]], path: Path) -> ImportedResult:
    """All records of a file as one result, warm-ups left out. Raises UsageProblem for what is no record."""
    tally = _Tally()
    for place, row in rows:
        if not looks_like_record(row):
            raise place.problem("no aiperf record (want metadata.benchmark_phase and metrics)")
        _add(row, tally, place)
    metrics: dict[str, ImportedMetric] = {}
    samples = {}
    for name, (ours, definition) in _TIMES.items():
        values = tally.times.get(name, [])
        if ours is not None:
            samples[ours] = tuple(values)
        metrics |= _statistics(name, ours, definition, values)
    inputs, outputs, lengths = _shape(tally.lengths)
    warnings = [f"{n} requests failed: {error}" for error, n in tally.errors.most_common(5)]
    kinds = tally.kinds
    return ImportedResult(
        source=str(path),
        tool=TOOL,
        version="unknown",
        layout="profile_export.jsonl",
        metrics=metrics,
        input_tokens=inputs,
        output_tokens=outputs,
        lengths=lengths,
        requests=kinds["ok"] + kinds["error"] + kinds["cancelled"],
        ok=kinds["ok"],
        failed=kinds["error"],
        cancelled=kinds["cancelled"],
        warmup_rows=kinds["warmup"],
        samples=samples,
        warnings=tuple(warnings),
    )


def _add(row: Mapping[str, Any], tally: _Tally, place: Place) -> None:
    metadata = mapping(row, "metadata")
    if metadata["benchmark_phase"] == "warmup":
        tally.kinds["warmup"] += 1
        return
    if metadata["benchmark_phase"] != "profiling":
        raise place.problem(
            f"benchmark_phase {metadata['benchmark_phase']!r} is neither warmup nor profiling"
        )
    error = mapping(row, "error")
    if metadata.get("was_cancelled") or error.get("code") == CANCELLED:
        tally.kinds["cancelled"] += 1
        return
    if row.get("error"):
        tally.kinds["error"] += 1
        told = (
            f"{error.get('code')} {error.get('type')}: {error.get('message')}" if error else str(row["error"])
        )
        tally.errors[told] += 1
        return
    tally.kinds["ok"] += 1
    metrics = mapping(row, "metrics")
    for name in _TIMES:
        if name in metrics:
            tally.times.setdefault(name, []).extend(_values(metrics[name], name, place))
    tally.lengths.add((_one(metrics, "input_sequence_length"), _one(metrics, "output_sequence_length")))


def _values(metric: Any, name: str, place: Place) -> list[float]:
    """One value or, for gaps, a list of them, in ms."""
    if not isinstance(metric, dict) or "value" not in metric:
        raise place.problem(f"{name}: want an object with value and unit, found {metric!r}")
    factor = to_ms(metric.get("unit"), name, place)
    values = metric["value"] if isinstance(metric["value"], list) else [metric["value"]]
    for value in values:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value < 0
        ):
            raise place.problem(f"{name}: {value!r} is no duration")
    return [value * factor for value in values]


def _one(metrics: Mapping[str, Any], name: str) -> float | None:
    value = mapping(metrics, name).get("value")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _shape(lengths: set[tuple[float | None, float | None]]) -> tuple[float | None, float | None, str]:
    if len(lengths) != 1:
        return None, None, "unknown"
    ((inputs, outputs),) = lengths
    return inputs, outputs, "exact" if inputs is not None and outputs is not None else "unknown"


def _statistics(
    name: str, ours: str | None, definition: str, values: Sequence[float]
) -> dict[str, ImportedMetric]:
    """Percentiles computed from single requests, in our ids where the quantity is ours."""
    note = "computed here from single requests" if values else f"no successful request has {name}"
    found = {}
    for statistic in ("p50", "p95", "p99", "mean", "max"):
        key = metric_key(TOOL, ours, statistic, f"{name}_{statistic}")
        if not values:
            value = None
        elif statistic in ("mean", "max"):
            value = max(values) if statistic == "max" else sum(values) / len(values)
        else:
            value = percentile(values, float(statistic[1:]))
        n = len(values) or None
        text = METRICS[key].definition if key in METRICS else f"{statistic} of: {definition}"
        found[key] = ImportedMetric(value, "ms", text, n, note)
    return found


def read_summary(data: Mapping[str, Any], place: Place) -> ImportedResult:
    """The summary file. Raises UsageProblem for a schema or a unit that is not known."""
    version = text_of(data, "aiperf_version")
    schema = str(data.get("schema_version", ""))
    if schema and schema.partition(".")[0] not in SCHEMAS:
        known = ", ".join(f"{major}.x" for major in SCHEMAS)
        raise place.problem(
            f"aiperf summary of schema_version {schema} (aiperf {version}); this version reads {known}"
        )
    ok = _counted(data, "request_count", place)
    failed = _counted(data, "error_request_count", place)
    metrics: dict[str, ImportedMetric] = {}
    for name, (ours, definition) in _TIMES.items():
        if name in data or name in ("time_to_first_token", "inter_token_latency", "request_latency"):
            metrics |= _summary_time(data, name, ours, definition, ok, place)
    for name in _RATES:
        metrics |= _summary_rate(data, name, ok, place)
    goodput, note = number(mapping(data, "goodput"), "avg", place)
    metrics["aiperf:goodput"] = ImportedMetric(
        goodput,
        "req/s",
        "requests inside an SLO that the file does not state / benchmark duration",
        None,
        "null in the file" if "goodput" in data and data["goodput"] is None else note,
    )
    duration = data.get("benchmark_duration")
    asked = mapping(data, "input_config")
    loadgen = mapping(asked, "loadgen") or mapping(mapping(asked, "perf_analyzer"), "stimulus")
    lengths = [_average(data, name, place) for name in ("input_sequence_length", "output_sequence_length")]
    if data.get("was_cancelled"):
        place.warnings.append("the benchmark was cancelled before its end")
    for entry in entries(data, "error_summary", place) or []:
        if not isinstance(entry, dict):
            raise place.problem(f"error_summary: want objects, found {entry!r}")
        details = mapping(entry, "error_details")
        place.warnings.append(
            f"{entry.get('count')} requests failed: {details.get('code')} {details.get('type')}: "
            f"{details.get('message')}"
        )
    return ImportedResult(
        source=place.name,
        tool=TOOL,
        version=version,
        layout=f"summary, schema {schema or 'without a version'}",
        metrics=metrics,
        input_tokens=lengths[0],
        output_tokens=lengths[1],
        lengths="mean" if any(lengths) else "unknown",
        concurrency=count(loadgen, "concurrency", place),
        requests=ok + (failed or 0) if ok is not None else None,
        ok=ok,
        failed=0 if failed is None and ok is not None else failed,
        failed_source="" if failed is not None else "error_request_count is left out when it is 0",
        duration_s=_seconds(duration, place),
        warnings=place.settle(),
    )


def _counted(data: Mapping[str, Any], name: str, place: Place) -> int | None:
    value = data.get(name)
    return count({name: value.get("avg") if isinstance(value, dict) else value}, name, place)


def _average(data: Mapping[str, Any], name: str, place: Place) -> float | None:
    return number(mapping(data, name), "avg", place)[0]


def _seconds(duration: Any, place: Place) -> float | None:
    """Duration of the benchmark; None where it has no unit."""
    if not isinstance(duration, dict):
        return None
    value, _ = number(duration, "avg", place)
    return (
        value * to_ms(duration.get("unit"), "benchmark_duration", place) / 1e3 if value is not None else None
    )


def _summary_time(
    data: Mapping[str, Any], name: str, ours: str | None, definition: str, n: int | None, place: Place
) -> dict[str, ImportedMetric]:
    metric = data.get(name)
    if not isinstance(metric, dict):
        note = MISSING if metric is None else f"{metric!r} without a unit in the file"
        key = metric_key(TOOL, ours, "p50", f"{name}_p50")
        return {key: ImportedMetric(None, "ms", f"p50 of: {definition}", None, note)}
    factor = to_ms(metric.get("unit"), name, place)
    found = {}
    stats = {"avg": "mean", "p50": "p50", "p95": "p95", "p99": "p99", "max": "max"}
    for theirs, statistic in stats.items():
        if theirs not in metric and theirs != "p50":
            continue
        value, note = number(metric, theirs, place)
        if value is not None and value < 0:
            place.contradictions.append(f"{name}.{theirs} is negative: {value:g}")
        key = metric_key(TOOL, ours, statistic, f"{name}_{statistic}")
        scaled = value * factor if value is not None else None
        samples = n if name != "inter_chunk_latency" and scaled is not None else None
        found[key] = ImportedMetric(scaled, "ms", f"{statistic} of: {definition}", samples, note)
    return found


def _summary_rate(
    data: Mapping[str, Any], name: str, n: int | None, place: Place
) -> dict[str, ImportedMetric]:
    ours, unit, units, definition = _RATES[name]
    metric = data.get(name)
    if not isinstance(metric, dict):
        note = MISSING if metric is None else f"{metric!r} without a unit in the file"
        return {ours: ImportedMetric(None, unit, definition, None, note)}
    if metric.get("unit") not in units:
        raise place.problem(f"{name}: unit {metric.get('unit')!r} is not known (known: {', '.join(units)})")
    value, note = number(metric, "avg", place)
    return {ours: ImportedMetric(value, unit, definition, n, note)}
