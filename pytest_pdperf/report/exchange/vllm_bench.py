"""`vllm bench serve --save-result`: one flat object a benchmark, one a line with --append-result.

Layouts: until 2025 without `failed` and with the key `request_goodput:` (colon and all), since then with
`failed`, `max_output_tokens_per_s` and both p50 and median. Warm-ups are not in these files.
Source: vllm/benchmarks/serve.py, vllm/benchmarks/lib/endpoint_request_func.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .fields import Place, count, entries, needed_count, number, rate_of, text_of
from .flat import Family, check_order, compare_samples, percentiles_from, read_family, read_rates
from .imported import ImportedMetric, ImportedResult

TOOL = "vllm"
_TOKEN_BACKENDS = ("vllm", "openai")
"""Backends of /v1/completions, where every chunk with choices brings tokens."""
_CHUNKS = "chunks with choices, also those without a token (role, finish_reason)"


def looks_like(data: Mapping[str, Any]) -> bool:
    """True for the tool's keys."""
    return {"backend", "num_prompts", "completed", "duration"} <= set(data)


def read(data: Mapping[str, Any], place: Place) -> ImportedResult:
    """One benchmark. Raises UsageProblem for numbers that cannot be."""
    backend = text_of(data, "backend", "endpoint_type")
    completed = needed_count(data, "completed", place)
    planned = needed_count(data, "num_prompts", place)
    if completed > planned:
        place.contradictions.append(f"completed {completed} > num_prompts {planned}")
    failed = count(data, "failed", place)
    stated = failed is not None
    if failed is not None and completed + failed > planned >= completed:
        place.contradictions.append(f"completed {completed} + failed {failed} > num_prompts {planned}")
    if failed is None:
        failed = max(0, planned - completed)
    families = _families(backend)
    metrics: dict[str, ImportedMetric] = {}
    for family in families:
        metrics |= read_family(data, family, TOOL, None if family.theirs == "itl" else completed, place)
    check_order(data, "ttft", "e2el", place)
    samples = _samples(data, place)
    for family in families:
        if (values := samples.get(f"{family.theirs}_ms")) is not None:
            compare_samples(values, data, family.theirs, place)
            percentiles_from(values, family, metrics, f"{family.theirs}s")
    metrics |= _rates(data, completed, place)
    inputs, outputs, lengths = _lengths(data, completed, place)
    duration, _ = number(data, "duration", place)
    return ImportedResult(
        source=place.name,
        tool=TOOL,
        version="unknown",
        layout="2026" if stated else "2025 or older",
        metrics=metrics,
        model=text_of(data, "model_id"),
        backend=backend,
        input_tokens=inputs,
        output_tokens=outputs,
        lengths=lengths,
        concurrency=count(data, "max_concurrency", place),
        request_rate=rate_of(data, "request_rate", place),
        requests=planned,
        ok=completed,
        failed=failed,
        failed_source="" if stated else "num_prompts - completed",
        duration_s=duration,
        samples=samples,
        warnings=place.settle(),
    )


def _families(backend: str) -> tuple[Family, ...]:
    if backend in _TOKEN_BACKENDS:
        return (
            Family("ttft", "ttft_ms", "first token event - send"),
            Family("tpot", "tpot_ms", "(last - first token) / (N - 1) per request"),
            Family("itl", "itl_ms", "gaps between events, pooled"),
            Family("e2el", "e2e_ms", "last token - send"),
        )
    return (
        Family("ttft", None, f"first of the {_CHUNKS} - send"),
        Family("tpot", None, f"(last - first) / (N - 1) over {_CHUNKS}"),
        Family("itl", None, f"gaps between {_CHUNKS}, pooled"),
        Family("e2el", None, f"last of the {_CHUNKS} - send"),
    )


def _rates(data: Mapping[str, Any], completed: int, place: Place) -> dict[str, ImportedMetric]:
    over = "duration of the benchmark, from before the first send until the last answer is collected"
    rows = (
        ("output_tps_wall", "output_throughput", "tok/s", f"output tokens / {over}"),
        ("request_rate", "request_throughput", "req/s", f"successful requests / {over}"),
    )
    found = read_rates(data, rows, completed, place)
    key = "request_goodput" if "request_goodput" in data else "request_goodput:"
    value, note = number(data, key, place)
    definition = f"requests inside an SLO that the file does not state / {over}"
    found[f"{TOOL}:request_goodput"] = ImportedMetric(value, "req/s", definition, completed, note)
    return found


def _good(data: Mapping[str, Any], size: int, place: Place) -> list[bool]:
    """Which requests succeeded: the lists of --save-detailed hold zeros for the others."""
    errors = entries(data, "errors", place)
    outputs = entries(data, "output_lens", place)
    for key, found in (("errors", errors), ("output_lens", outputs)):
        if found is not None and len(found) != size:
            raise place.problem(f"{key} has {len(found)} entries, other lists have {size}")
    return [not (errors and errors[i]) and not (outputs and outputs[i] == 0) for i in range(size)]


def _samples(data: Mapping[str, Any], place: Place) -> dict[str, tuple[float, ...]]:
    """Samples of single requests in ms; the file has them in seconds."""
    found: dict[str, tuple[float, ...]] = {}
    ttfts, itls = entries(data, "ttfts", place), entries(data, "itls", place)
    if ttfts:
        good = _good(data, len(ttfts), place)
        found["ttft_ms"] = _ms([t for t, ok in zip(ttfts, good, strict=True) if ok], "ttfts", place)
    if itls:
        for row in itls:
            if not isinstance(row, list):
                raise place.problem(f"itls: {row!r} is no list of gaps")
        good = _good(data, len(itls), place)
        gaps = [gap for row, ok in zip(itls, good, strict=True) if ok for gap in row]
        found["itl_ms"] = _ms(gaps, "itls", place)
    return found


def _ms(seconds: Sequence[Any], key: str, place: Place) -> tuple[float, ...]:
    for value in seconds:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value < 0
        ):
            raise place.problem(f"{key}: {value!r} is no time in seconds")
    return tuple(value * 1e3 for value in seconds)


def _lengths(data: Mapping[str, Any], completed: int, place: Place) -> tuple[float | None, float | None, str]:
    """Tokens in and out of a request; totals of these files count successful requests only."""
    inputs, outputs = entries(data, "input_lens", place), entries(data, "output_lens", place)
    for key, found in (("input_lens", inputs), ("output_lens", outputs)):
        for value in found or ():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise place.problem(f"{key}: {value!r} is no number of tokens")
    if inputs and outputs and len(inputs) == len(outputs):
        good = _good(data, len(inputs), place)
        pairs = {(i, o) for i, o, ok in zip(inputs, outputs, good, strict=True) if ok}
        if len(pairs) == 1:
            ((one, other),) = pairs
            return float(one), float(other), "exact"
    totals = count(data, "total_input_tokens", place), count(data, "total_output_tokens", place)
    means = [total / completed if total is not None and completed else None for total in totals]
    return means[0], means[1], "mean" if any(means) else "unknown"
