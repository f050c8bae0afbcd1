"""A Mooncake trace is a load, not a measurement: what is imported is what it asks of a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_pdperf.spec.trace import BLOCK_TOKENS, read_trace

from .imported import ImportedMetric, ImportedResult

TOOL = "mooncake"


def looks_like(data: Mapping[str, Any]) -> bool:
    """True for a line of such a trace."""
    return {"timestamp", "input_length", "output_length"} <= set(data)


def read(path: Path) -> ImportedResult:
    """The trace's load. Raises UsageProblem, naming the line, for what is no trace."""
    requests = read_trace(path)
    seen: set[int] = set()
    blocks = shared = 0
    for request in requests:
        blocks += len(request.hash_ids)
        shared += sum(block in seen for block in request.hash_ids)
        seen.update(request.hash_ids)
    n = len(requests)
    inputs = {r.input_tokens for r in requests}
    outputs = {r.output_tokens for r in requests}
    span = requests[-1].at_s - requests[0].at_s
    metrics = {
        "mooncake:input_tokens_max": ImportedMetric(max(inputs), "tokens", "longest prompt", n),
        "mooncake:output_tokens_max": ImportedMetric(max(outputs), "tokens", "longest answer", n),
        "mooncake:requests_per_second": ImportedMetric(
            (n - 1) / span if span > 0 else None,
            "req/s",
            "(requests - 1) / (last arrival - first)",
            n,
            "" if span > 0 else "all requests arrive at once",
        ),
        "mooncake:shared_block_share": ImportedMetric(
            shared / blocks if blocks else None,
            "1",
            f"prompt blocks of {BLOCK_TOKENS} tokens that an earlier request had too / all blocks",
            n,
            "" if blocks else "the trace has no hash_ids",
        ),
    }
    exact = len(inputs) == 1 and len(outputs) == 1
    return ImportedResult(
        source=str(path),
        tool=TOOL,
        version="unversioned",
        layout="trace",
        metrics=metrics,
        input_tokens=sum(r.input_tokens for r in requests) / n,
        output_tokens=sum(r.output_tokens for r in requests) / n,
        lengths="exact" if exact else "mean",
        request_rate="as the trace says",
        requests=n,
        duration_s=span,
        warnings=("a trace of requests: it holds no measurement",),
    )
