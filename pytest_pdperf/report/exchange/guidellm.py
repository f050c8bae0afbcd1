"""guidellm's JSON report, version 2: several benchmarks a file, each metric split by how its requests ended.

Names that end in `_ms` are milliseconds, `request_latency` is seconds. Only `successful` is read.
Source: guidellm's GenerativeMetrics and GenerativeRequestStats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fields import MISSING, Place, count, mapping, number, rate_of, text_of
from .imported import ImportedMetric, ImportedResult, metric_key

TOOL = "guidellm"
VERSIONS = (2,)

_TIMES: Mapping[str, tuple[str | None, float, str]] = {
    "time_to_first_token_ms": ("ttft_ms", 1.0, "first token event - send"),
    "inter_token_latency_ms": ("tpot_ms", 1.0, "(last - first token) / (N - 1), one a request"),
    "time_per_output_token_ms": (None, 1.0, "(last token - send) / N, holds the TTFT"),
    "request_latency": (None, 1e3, "end of the stream - send"),
}
"""Name -> (our stem, factor to ms, definition)."""
_RATES = {
    "requests_per_second": ("req/s", "rate of requests, averaged over the time of the benchmark"),
    "output_tokens_per_second": ("tok/s", "rate of output tokens, averaged over the time of the benchmark"),
    "request_concurrency": ("1", "requests in flight, averaged over the time of the benchmark"),
}


def looks_like(data: Mapping[str, Any]) -> bool:
    """True for a report of any version."""
    return isinstance(data.get("benchmarks"), list) and (
        "guidellm_version" in mapping(data, "metadata")
        or any(isinstance(b, dict) and "generative" in str(b.get("type_", "")) for b in data["benchmarks"])
    )


def read(data: Mapping[str, Any], place: Place) -> tuple[ImportedResult, ...]:
    """Every benchmark of a report. Raises UsageProblem for another version, naming what was found."""
    metadata = mapping(data, "metadata")
    version = text_of(metadata, "guidellm_version")
    if metadata.get("version") not in VERSIONS:
        found = metadata.get("version", "none")
        known = ", ".join(str(v) for v in VERSIONS)
        raise place.problem(
            f"guidellm report of version {found} (guidellm {version}); this version reads {known}"
        )
    if not data["benchmarks"]:
        raise place.problem("a guidellm report without a benchmark")
    backend = mapping(mapping(mapping(data, "config"), "spec"), "backend")
    results = []
    for number_, benchmark in enumerate(data["benchmarks"]):
        here = Place(place.path, f"benchmarks[{number_}]")
        if not isinstance(benchmark, dict):
            raise here.problem(f"want an object, found {benchmark!r}")
        results.append(_benchmark(benchmark, backend, version, here))
    return tuple(results)


def _benchmark(
    data: Mapping[str, Any], backend: Mapping[str, Any], version: str, place: Place
) -> ImportedResult:
    metrics = mapping(data, "metrics")
    totals = mapping(metrics, "request_totals")
    ok = count(totals, "successful", place)
    found: dict[str, ImportedMetric] = {}
    for name, (ours, factor, definition) in _TIMES.items():
        found |= _time(metrics, name, ours, factor, definition, ok, place)
    for name, (unit, definition) in _RATES.items():
        value, note = number(_successful(metrics, name), "mean", place)
        found[f"{TOOL}:{name}_mean"] = ImportedMetric(value, unit, definition, ok, note)
    strategy = mapping(mapping(data, "config"), "strategy")
    lengths = [
        number(_successful(metrics, name), "mean", place)[0]
        for name in ("prompt_token_count", "output_token_count")
    ]
    state = mapping(data, "scheduler_state")
    start, _ = number(state, "start_time", place)
    end, _ = number(state, "end_time", place)
    return ImportedResult(
        source=place.name,
        tool=TOOL,
        version=version,
        layout="report version 2",
        metrics=found,
        model=text_of(backend, "model"),
        backend=text_of(backend, "kind"),
        input_tokens=lengths[0],
        output_tokens=lengths[1],
        lengths="mean" if any(lengths) else "unknown",
        concurrency=count(strategy, "streams", place),
        request_rate=rate_of(strategy, "rate", place),
        requests=count(totals, "total", place),
        ok=ok,
        failed=count(totals, "errored", place),
        cancelled=count(totals, "incomplete", place),
        duration_s=end - start if start is not None and end is not None else None,
        warnings=place.settle(),
    )


def _successful(metrics: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return mapping(mapping(metrics, name), "successful")


def _time(
    metrics: Mapping[str, Any],
    name: str,
    ours: str | None,
    factor: float,
    definition: str,
    n: int | None,
    place: Place,
) -> dict[str, ImportedMetric]:
    summary = _successful(metrics, name)
    percentiles = mapping(summary, "percentiles")
    median, why = number(summary, "median", place)
    p50, _ = number(percentiles, "p50", place)
    if median is not None and p50 is not None and abs(median - p50) > 1e-6 * max(median, p50):
        place.contradictions.append(f"{name}: median {median:g} is not p50 {p50:g}")
    values: dict[str, tuple[float | None, str]] = {
        "p50": (p50 if p50 is not None else median, "" if p50 is not None else why),
        "mean": number(summary, "mean", place),
        "p95": number(percentiles, "p95", place),
        "p99": number(percentiles, "p99", place),
        "max": number(summary, "max", place),
    }
    stem = name.removesuffix("_ms")
    found = {}
    for statistic, (value, note) in values.items():
        if value is None and note == MISSING and statistic != "p50":
            continue
        if value is not None and value < 0:
            place.contradictions.append(f"{name}: {statistic} is negative: {value:g}")
        scaled = value * factor if value is not None else None
        text = f"{statistic} of: {definition}"
        key = metric_key(TOOL, ours, statistic, f"{stem}_ms_{statistic}")
        found[key] = ImportedMetric(scaled, "ms", text, n if scaled is not None else None, note)
    return found
