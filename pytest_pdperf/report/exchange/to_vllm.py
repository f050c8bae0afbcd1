"""A cell in the flat JSON of `vllm bench serve --save-result`, so that tools made for it read ours.

All numbers are recomputed with vLLM's definitions from the records; without records those of the summary with the very
same definition are used and the rest is null. A number that is not known is null, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from pytest_pdperf.measure.alternatives import populations, recompute
from pytest_pdperf.measure.cell_result import MetricValue
from pytest_pdperf.measure.records import CellRecords
from pytest_pdperf.measure.samples import percentile, successes, tokens_of
from pytest_pdperf.measure.table import DEFINITIONS
from pytest_pdperf.measure.window import wall

from .chosen import Chosen

_STEMS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2el": "e2e_ms"}
_SUMMARY = {"mean": "mean", "median": "p50", "p50": "p50", "p95": "p95", "p99": "p99"}


def vllm_results(chosen: Chosen, *, detailed: bool = False) -> Iterator[dict[str, Any]]:
    """One flat object a stream of the cell. With `detailed` also the lists of --save-detailed, in seconds."""
    for stream, records in chosen.streams():
        label = f"{chosen.name}/{stream}" if stream else chosen.name
        head = _head(chosen, label, records, main=not stream)
        if records is not None:
            yield head | _of_records(records) | (_details(records) if detailed else {})
        else:
            yield head | _of_summary(chosen, stream)


def _head(chosen: Chosen, label: str, records: CellRecords | None, *, main: bool) -> dict[str, Any]:
    result = chosen.outcome.result
    when = datetime.fromtimestamp(records.started_ns / 1e9, UTC) if records is not None else None
    closed = chosen.concurrency is not None and main
    return {
        "date": when.strftime("%Y%m%d-%H%M%S") if when else None,
        "endpoint_type": "vllm",
        "backend": "vllm",
        "label": label,
        "model_id": chosen.facts.get("model", "unknown"),
        "tokenizer_id": None,
        "request_rate": "inf" if closed else None,
        "burstiness": None,
        "max_concurrency": chosen.concurrency if closed else None,
        "request_goodput": None,
        "pdperf_definitions": DEFINITIONS,
        "pdperf_engine": chosen.outcome.engine,
        "pdperf_verdict": chosen.outcome.verdict,
        "pdperf_evidence": chosen.outcome.evidence,
        "pdperf_invalid": list(result.invalid),
        "pdperf_stamp_source": result.stamp_source,
    }


def _of_records(records: CellRecords) -> dict[str, Any]:
    measured = [r for r in records.requests if not r.warmup]
    good = successes(measured)
    inputs = [r.prompt_tokens if r.prompt_tokens is not None else r.planned_input_tokens for r in good]
    rates = recompute(records, "vllm")
    duration = wall(measured).seconds if measured else None
    tokens_in = sum(inputs)
    output = rates["output_throughput"].value
    found: dict[str, Any] = {
        "num_prompts": len(measured),
        "duration": duration,
        "completed": len(good),
        "failed": len(measured) - len(good),
        "total_input_tokens": tokens_in,
        "total_output_tokens": sum(tokens_of(r) for r in good),
        "request_throughput": rates["request_throughput"].value,
        "output_throughput": output,
        "total_token_throughput": output + tokens_in / duration if output is not None and duration else None,
        "max_concurrent_requests": max(records.reached_concurrency.values(), default=None),
    }
    for population in populations("vllm"):
        sample = population.sample(good)
        name = population.name
        found[f"mean_{name}"] = float(sample.mean()) if sample.size else None
        found[f"median_{name}"] = percentile(sample, 50)
        found[f"std_{name}"] = float(np.std(sample)) if sample.size else None
        for p in (50, 95, 99):
            found[f"p{p}_{name}"] = percentile(sample, p)
    return found


def _of_summary(chosen: Chosen, stream: str) -> dict[str, Any]:
    result = chosen.outcome.result
    metrics: Mapping[str, MetricValue] = result.streams[stream] if stream else result.metrics
    whole = not stream and result.ok == result.requests

    def value(name: str) -> float | None:
        return metrics[name].value if name in metrics else None

    found: dict[str, Any] = {
        "num_prompts": None if stream else result.requests,
        "duration": None if stream else result.wall_s,
        "completed": None if stream else result.ok,
        "failed": None if stream else result.requests - result.ok,
        "total_input_tokens": result.prompt_tokens if whole else None,
        "total_output_tokens": result.completion_tokens if whole else None,
        "request_throughput": value("request_rate"),
        "output_throughput": value("output_tps_wall"),
        "total_token_throughput": None,
        "max_concurrent_requests": None if stream else result.max_in_flight or None,
    }
    for theirs, ours in _STEMS.items():
        for name, statistic in _SUMMARY.items():
            found[f"{name}_{theirs}_ms"] = value(f"{ours}_{statistic}")
        found[f"std_{theirs}_ms"] = None
    return found


def _details(records: CellRecords) -> dict[str, Any]:
    """The lists of --save-detailed; as there, a failed request has 0 tokens, a TTFT of 0.0 and an error."""
    measured = [r for r in records.requests if not r.warmup]
    ok = {id(r) for r in successes(measured)}
    start = min((r.sent_ns for r in measured), default=0)
    return {
        "input_lens": [
            r.prompt_tokens if r.prompt_tokens is not None else r.planned_input_tokens for r in measured
        ],
        "output_lens": [tokens_of(r) if id(r) in ok else 0 for r in measured],
        "ttfts": [(r.event_ns[0] - r.sent_ns) / 1e9 if id(r) in ok and r.event_ns else 0.0 for r in measured],
        "itls": [
            [(b - a) / 1e9 for a, b in zip(r.event_ns, r.event_ns[1:], strict=False)] if id(r) in ok else []
            for r in measured
        ],
        "start_times": [(r.sent_ns - start) / 1e9 for r in measured],
        "generated_texts": [r.text for r in measured],
        "errors": ["" if id(r) in ok else r.error or str(r.status) for r in measured],
    }
