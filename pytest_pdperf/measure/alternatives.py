"""The same records under other tools' definitions, so that a difference of numbers can be told from one of meaning.

Three numbers are called TPOT and two populations are called ITL; comparing across them is refused (`comparable`), and a
published figure is reproduced by recomputing with its tool's definition. What counts as an event stays ours: some tools
also stamp chunks that hold no token.

Sources: vllm/benchmarks/serve.py (calculate_metrics), sglang/bench_serving.py (calculate_metrics), aiperf's metric
reference, guidellm's GenerativeRequestStats.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytest_pdperf.errors import UsageProblem

from .cell_result import MetricValue
from .records import CellRecords, RequestRecord
from .samples import (
    MS,
    e2e_ms,
    gaps_ms,
    itl_per_token_ms,
    percentile,
    pooled,
    successes,
    tokens_of,
    tpot_ms,
    ttft_ms,
)
from .window import end_of, wall

Floats = NDArray[np.float64]
Sample = Callable[[Sequence[RequestRecord]], Floats]


def _each(one: Callable[[RequestRecord], float | None]) -> Sample:
    def sample(requests: Sequence[RequestRecord]) -> Floats:
        return np.asarray([v for r in requests if (v := one(r)) is not None], dtype=np.float64)

    return sample


def _gaps(requests: Sequence[RequestRecord]) -> Floats:
    return pooled([gaps_ms(r) for r in requests])


def _per_token_gaps(requests: Sequence[RequestRecord]) -> Floats:
    """Split gaps where an event's count is known, whole gaps where it is not, as sglang does by its own counts."""
    found = [(itl_per_token_ms(r), r) for r in requests]
    return pooled([gaps_ms(r) if split is None else split for split, r in found])


def tpot_with_ttft_ms(request: RequestRecord) -> float | None:
    """(last token - send) / N: holds the TTFT."""
    last, count = e2e_ms(request), tokens_of(request)
    return last / count if last is not None and count else None


def tpot_of_whole_ms(request: RequestRecord) -> float | None:
    """(end of the stream - send) / N: holds the TTFT and what came after the last token."""
    count = tokens_of(request)
    return (end_of(request) - request.sent_ns) / MS / count if count else None


def whole_ms(request: RequestRecord) -> float | None:
    """End of the stream - send."""
    return (end_of(request) - request.sent_ns) / MS


def tpot_to_end_ms(request: RequestRecord) -> float | None:
    """(end of the stream - first token) / (N - 1), None for N < 2: holds what came after the last token."""
    count = tokens_of(request)
    if not request.event_ns or count is None or count < 2:
        return None
    return (end_of(request) - request.event_ns[0]) / MS / (count - 1)


@dataclass(frozen=True, slots=True)
class Population:
    """What a tool's metric is a statistic of."""

    name: str
    """The tool's own name."""
    ours: str | None
    """Stem of the metric in our table with the very same definition, None when there is none."""
    definition: str
    sample: Sample


_TTFT = Population("ttft_ms", "ttft_ms", "first token event - send", _each(ttft_ms))
_TPOT = Population("tpot_ms", "tpot_ms", "(last - first token) / (N - 1) per request", _each(tpot_ms))
_GAPS = Population("itl_ms", "itl_ms", "gaps between events, pooled", _gaps)
_LAST = Population("e2el_ms", "e2e_ms", "last token - send", _each(e2e_ms))

TOOLS: Mapping[str, tuple[Population, ...]] = {
    "vllm": (_TTFT, _TPOT, _GAPS, _LAST),
    "sglang": (
        _TTFT,
        # Its client stamps a request's latency at the last line it reads, [DONE] included.
        Population("tpot_ms", None, "(end of the stream - first token) / (N - 1)", _each(tpot_to_end_ms)),
        Population(
            "itl_ms", "itl_per_token_ms", "gaps split over the tokens of their event, pooled", _per_token_gaps
        ),
        Population("e2e_latency_ms", None, "end of the stream - send", _each(whole_ms)),
    ),
    "aiperf": (
        Population("time_to_first_token", "ttft_ms", "first token event - send", _each(ttft_ms)),
        Population(
            "inter_token_latency", "tpot_ms", "(last - first token) / (N - 1), one a request", _each(tpot_ms)
        ),
        Population("inter_chunk_latency", "itl_ms", "gaps between events, pooled", _gaps),
        Population("request_latency", "e2e_ms", "last token - send", _each(e2e_ms)),
    ),
    "guidellm": (
        Population("time_to_first_token_ms", "ttft_ms", "first token event - send", _each(ttft_ms)),
        Population(
            "inter_token_latency_ms",
            "tpot_ms",
            "(last - first token) / (N - 1), one a request",
            _each(tpot_ms),
        ),
        Population(
            "time_per_output_token_ms",
            None,
            "(last token - send) / N, holds the TTFT",
            _each(tpot_with_ttft_ms),
        ),
        Population("request_latency_ms", None, "end of the stream - send", _each(whole_ms)),
    ),
}
_STATISTICS: Mapping[str, Callable[[Floats], float | None]] = {
    "mean": lambda v: float(v.mean()) if v.size else None,
    "median": lambda v: percentile(v, 50),
    "p95": lambda v: percentile(v, 95),
    "p99": lambda v: percentile(v, 99),
}


def populations(tool: str) -> tuple[Population, ...]:
    """What a tool measures. Raises UsageProblem for a tool that is not known."""
    try:
        return TOOLS[tool]
    except KeyError:
        near = difflib.get_close_matches(tool, TOOLS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageProblem(f"--definitions {tool!r}: want one of {', '.join(TOOLS)}{hint}") from None


def recompute(records: CellRecords, tool: str) -> dict[str, MetricValue]:
    """The cell's numbers as `tool` would have reported them from these very stamps.

    Keys are `<statistic>_<the tool's name>` plus `output_throughput` and `request_throughput` over the wall time.
    Success-only, like all four tools. Raises UsageProblem for a tool that is not known.
    """
    measured = [r for r in records.requests if not r.warmup]
    good = successes(measured)
    values: dict[str, MetricValue] = {}
    for population in populations(tool):
        sample = population.sample(good)
        note = population.definition if sample.size else f"no sample of: {population.definition}"
        for name, statistic in _STATISTICS.items():
            values[f"{name}_{population.name}"] = MetricValue(statistic(sample), sample.size, note)
    seconds = wall(measured).seconds if measured else 0.0
    tokens = sum(tokens_of(r) for r in good)
    for name, amount in (("output_throughput", tokens), ("request_throughput", len(good))):
        value = amount / seconds if good and seconds > 0 else None
        values[name] = MetricValue(value, len(good), "over the wall time of the cell")
    return values


def comparable(ours: str, tool: str, theirs: str) -> str:
    """Why our metric stem and a tool's metric may not be compared, empty when their definitions are the same.

    Raises UsageProblem for a metric that the tool does not have.
    """
    known = {p.name: p for p in populations(tool)}
    if theirs not in known:
        near = difflib.get_close_matches(theirs, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageProblem(f"{tool} has no metric {theirs!r}{hint}")
    if known[theirs].ours == ours:
        return ""
    return f"{tool}'s {theirs} is {known[theirs].definition}; ours, {ours}, is another quantity"
