"""`sglang.bench_serving --output-file`: one flat object a line, one line a benchmark.

Its end-to-end latency is stamped at the last line read, [DONE] included, and its TPOT is made from it: neither is
ours. Source: sglang/bench_serving.py, sglang/benchmark/serving.py (async_request_*, calculate_metrics).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fields import Place, count, needed_count, number, rate_of, text_of
from .flat import Family, check_order, read_family, read_rates
from .imported import ImportedMetric, ImportedResult

TOOL = "sglang"
RETOKENISED_AT_LEAST = 0.5
"""Text that holds fewer tokens than this share of those claimed: the claim is not believed."""
_NATIVE = ("sglang", "sglang-native")
"""Backends of /generate, whose client splits a gap over the tokens of its event."""


def looks_like(data: Mapping[str, Any]) -> bool:
    """True for the tool's keys."""
    return {"backend", "completed", "duration", "mean_e2e_latency_ms"} <= set(data)


def read(data: Mapping[str, Any], place: Place) -> ImportedResult:
    """One benchmark. Raises UsageProblem for numbers that cannot be."""
    backend = text_of(data, "backend")
    completed = needed_count(data, "completed", place)
    metrics: dict[str, ImportedMetric] = {}
    for family in _families(backend):
        metrics |= read_family(data, family, TOOL, None if family.theirs == "itl" else completed, place)
    check_order(data, "ttft", "e2e_latency", place)
    claimed = count(data, "total_output_tokens", place)
    text = count(data, "total_output_tokens_retokenized", place)
    if claimed and text is not None and text / claimed < RETOKENISED_AT_LEAST:
        place.contradictions.append(
            f"retokenised/claimed = {text / claimed:.3f} < {RETOKENISED_AT_LEAST}: tokens that the text does not hold"
        )
    if place.contradictions and completed:
        place.contradictions += _zeros(data)
    metrics |= _rates(data, completed, place)
    inputs, outputs, lengths = _lengths(data, completed, claimed, place)
    duration, _ = number(data, "duration", place)
    return ImportedResult(
        source=place.name,
        tool=TOOL,
        version="unknown",
        layout="2026" if "server_info" in data else "2025 or older",
        metrics=metrics,
        model=text_of(data, "model", "model_id"),
        backend=backend,
        input_tokens=inputs,
        output_tokens=outputs,
        lengths=lengths,
        concurrency=count(data, "max_concurrency", place),
        request_rate=rate_of(data, "request_rate", place),
        requests=None,
        ok=completed,
        failed=None,
        failed_source="the file does not say how many requests were sent",
        duration_s=duration,
        warnings=place.settle(),
    )


def _families(backend: str) -> tuple[Family, ...]:
    if backend in _NATIVE:
        itl = Family("itl", "itl_per_token_ms", "gaps split over the tokens of their event, pooled")
    else:
        itl = Family("itl", "itl_ms", "gaps between events, pooled")
    return (
        Family("ttft", "ttft_ms", "first token event - send"),
        Family("tpot", None, "(end of the stream - first token) / (N - 1) per request"),
        itl,
        Family("e2e_latency", None, "end of the stream - send"),
    )


def _zeros(data: Mapping[str, Any]) -> list[str]:
    """What else is impossible in a file that is refused anyway; alone, a 0 only means that there was no sample."""
    tpot = any(data.get(f"{statistic}_tpot_ms") == 0 for statistic in ("mean", "median"))
    itl = any(data.get(f"{statistic}_itl_ms") == 0 for statistic in ("mean", "median"))
    return ["TPOT <= 0"] * tpot + ["ITL == 0"] * itl


def _rates(data: Mapping[str, Any], completed: int, place: Place) -> dict[str, ImportedMetric]:
    rows = (
        ("output_tps_wall", "output_throughput", "tok/s", "output tokens / duration of the benchmark"),
        ("request_rate", "request_throughput", "req/s", "successful requests / duration of the benchmark"),
        (
            "sglang:concurrency",
            "concurrency",
            "1",
            "sum of all latencies / duration: mean requests in flight",
        ),
        (
            "sglang:accept_length",
            "accept_length",
            "tokens",
            "tokens a step with speculative decoding, by the server",
        ),
    )
    return read_rates(data, rows, completed, place)


def _lengths(
    data: Mapping[str, Any], completed: int, claimed: int | None, place: Place
) -> tuple[float | None, float | None, str]:
    asked = count(data, "random_input_len", place), count(data, "random_output_len", place)
    if (
        data.get("dataset_name") in ("random", "random-ids")
        and data.get("random_range_ratio") == 1
        and all(asked)
    ):
        return asked[0], asked[1], "exact"
    total = count(data, "total_input_tokens", place)
    if not completed:
        return None, None, "unknown"
    means = [t / completed if t is not None else None for t in (total, claimed)]
    return means[0], means[1], "mean" if any(means) else "unknown"
