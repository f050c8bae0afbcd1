"""A cell as an llm-d Benchmark Report (v0.2), so that what compares llm-d's runs can hold ours beside them.

Latencies are in ms. A statistic there needs its mean, so one whose mean is not known is left out, never made up. Every
process is a `generic` component with its command line; a bad cell says so in `run.description` and `run.keywords`.

Format: https://github.com/llm-d/llm-d-benchmark, package `llmd-benchmark-report`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_pdperf import __version__
from pytest_pdperf.measure.alternatives import populations
from pytest_pdperf.measure.cell_result import MetricValue
from pytest_pdperf.measure.records import CellRecords, RequestRecord
from pytest_pdperf.measure.samples import successes, tokens_of

from .chosen import Chosen

VERSION = "0.2"
_SHAPE = re.compile(r"\Ain(\d+)-out(\d+)-c\d+\Z")
_LATENCIES = {
    "ttft_ms": ("time_to_first_token", "ms"),
    "tpot_ms": ("time_per_output_token", "ms/token"),
    "itl_ms": ("inter_token_latency", "ms/token"),
    "e2e_ms": ("request_latency", "ms"),
}
_PERCENTILES = {
    "p0p1": 0.1, "p1": 1, "p5": 5, "p10": 10, "p25": 25, "p50": 50, "p75": 75, "p90": 90, "p95": 95, "p99": 99,
    "p99p9": 99.9,
}  # fmt: skip


def llm_d_reports(chosen: Chosen) -> Iterator[dict[str, Any]]:
    """One report a stream of the cell."""
    for stream, records in chosen.streams():
        measured = [r for r in records.requests if not r.warmup] if records is not None else None
        yield {
            "version": VERSION,
            "run": _run(chosen, stream, records),
            "scenario": {"stack": _stack(chosen), **_load(chosen)},
            "results": {"request_performance": {"aggregate": _aggregate(chosen, stream, measured)}},
        }


def _run(chosen: Chosen, stream: str, records: CellRecords | None) -> dict[str, Any]:
    outcome = chosen.outcome
    name = f"{chosen.name}/{stream}" if stream else chosen.name
    bad = "; ".join(outcome.result.invalid)
    found: dict[str, Any] = {
        "uid": hashlib.sha256(f"{chosen.run.name}/{name}".encode()).hexdigest()[:32],
        "eid": chosen.run.name,
        "description": f"{name}: {'INVALID: ' + bad if bad else outcome.verdict or 'not judged'}",
        "keywords": [
            outcome.kind,
            outcome.engine,
            outcome.evidence,
            *([outcome.verdict] if outcome.verdict else []),
        ],
    }
    if records is not None:
        start, end = (datetime.fromtimestamp(ns / 1e9, UTC) for ns in (records.started_ns, records.ended_ns))
        seconds = (end - start).total_seconds()
        found["time"] = {"start": start.isoformat(), "end": end.isoformat(), "duration": f"PT{seconds:.3f}S"}
    return found


def _stack(chosen: Chosen) -> list[dict[str, Any]]:
    stack = []
    for instance, command in sorted(chosen.commands.items()):
        role = instance.rsplit("-", 1)[0]
        tool = "router" if role == "router" else "engine"
        stack.append(
            {
                "metadata": {"label": instance, "cfg_id": hashlib.sha256(command.encode()).hexdigest()[:32]},
                "standardized": {
                    "kind": "generic",
                    "tool": chosen.outcome.engine if tool == "engine" else "router",
                    "tool_version": chosen.version(tool) or "unknown",
                    "role": role,
                },
                "native": {"config": command},
            }
        )
    return stack


def _load(chosen: Chosen) -> dict[str, Any]:
    """Only for a cell whose id says its shape: several streams have several."""
    shape = _SHAPE.match(chosen.outcome.result.cell)
    if shape is None:
        return {}
    lengths = [{"distribution": "fixed", "value": int(text)} for text in shape.groups()]
    standardized = {
        "tool": "pytest-pdperf",
        "tool_version": __version__,
        "source": "random",
        "input_seq_len": lengths[0],
        "output_seq_len": lengths[1],
        "concurrency": chosen.concurrency,
    }
    return {"load": {"metadata": {}, "standardized": standardized, "native": {}}}


def _aggregate(chosen: Chosen, stream: str, measured: Sequence[RequestRecord] | None) -> dict[str, Any]:
    result = chosen.outcome.result
    metrics: Mapping[str, MetricValue] = result.streams[stream] if stream else result.metrics
    requests: dict[str, Any] = {"total": result.requests, "failures": result.requests - result.ok}
    latency: dict[str, Any] = {}
    if measured is not None:
        good = successes(measured)
        requests = {"total": len(measured), "failures": len(measured) - len(good)}
        inputs = [r.prompt_tokens if r.prompt_tokens is not None else r.planned_input_tokens for r in good]
        outputs = [count for r in good if (count := tokens_of(r)) is not None]
        for name, counts in (("input_length", inputs), ("output_length", outputs)):
            if counts:
                requests[name] = statistics(np.asarray(counts, dtype=np.float64), "count")
        for population in populations("vllm"):
            theirs = _LATENCIES.get(population.ours or population.name)
            sample = population.sample(good)
            if theirs is not None and sample.size:
                latency[theirs[0]] = statistics(sample, theirs[1])
    else:
        for ours, (theirs_name, unit) in _LATENCIES.items():
            found = _of_summary(metrics, ours, unit)
            if found is not None:
                latency[theirs_name] = found
    throughput = {
        name: {"units": unit, "mean": metrics[ours].value}
        for name, ours, unit in (
            ("output_token_rate", "output_tps_wall", "tokens/s"),
            ("request_rate", "request_rate", "queries/s"),
        )
        if ours in metrics and metrics[ours].value is not None
    }
    return {"requests": requests, "latency": latency, "throughput": throughput}


def statistics(values: NDArray[np.float64], units: str) -> dict[str, Any]:
    """Mean, deviation of the population, extremes and percentiles (linear) of at least one value."""
    found = {name: float(np.percentile(values, p)) for name, p in _PERCENTILES.items()}
    spread = {"stddev": float(values.std()), "min": float(values.min()), "max": float(values.max())}
    return {"units": units, "mean": float(values.mean()), **spread, **found}


def _of_summary(metrics: Mapping[str, MetricValue], ours: str, units: str) -> dict[str, Any] | None:
    known = {
        name: value
        for name in ("mean", "p50", "p95", "p99", "max")
        if (measured := metrics.get(f"{ours}_{name}")) is not None and (value := measured.value) is not None
    }
    return {"units": units, **known} if "mean" in known else None
