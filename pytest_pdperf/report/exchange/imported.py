"""What another tool measured, kept apart from our own results: its numbers never reach a baseline or a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pytest_pdperf.measure.table import METRICS


@dataclass(frozen=True, slots=True)
class ImportedMetric:
    """One foreign number. `value` None is "not known", and `note` says why."""

    value: float | None
    unit: str
    definition: str
    n: int | None = None
    """Samples behind it, None where the file does not say."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class ImportedResult:
    """One benchmark of a foreign file: its load, its outcome, its metrics.

    Keys of `metrics` are ours (`ttft_ms_p50`) where the definition is the very same, else `<tool>:<its name>`.
    """

    source: str
    """File, with the place in it where it holds several benchmarks."""
    tool: str
    version: str
    """The tool's, as far as the file says; `unknown` where it does not."""
    layout: str
    """Which of the tool's file layouts was read."""
    metrics: Mapping[str, ImportedMetric]
    model: str = "unknown"
    backend: str = "unknown"
    input_tokens: float | None = None
    """Prompt tokens a request."""
    output_tokens: float | None = None
    lengths: str = "unknown"
    """`exact` where every request has those lengths, `mean` where they are an average, else `unknown`."""
    concurrency: int | None = None
    request_rate: str = "unknown"
    """Requests a second that were asked for, or `inf`."""
    requests: int | None = None
    """Measured requests, warm-ups left out."""
    ok: int | None = None
    failed: int | None = None
    failed_source: str = ""
    """Where `failed` comes from when the file does not say it."""
    cancelled: int | None = None
    warmup_rows: int | None = None
    duration_s: float | None = None
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Metric stem (`ttft_ms`) -> samples, in ms, where the file holds single requests."""
    warnings: tuple[str, ...] = ()

    @property
    def shape(self) -> str:
        """`512/256`, with ~ before an average and ? for what is not known."""
        about = "" if self.lengths == "exact" else "~"
        return "/".join(
            "?" if tokens is None else f"{about}{tokens:g}"
            for tokens in (self.input_tokens, self.output_tokens)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data; samples are left out."""
        data = asdict(self)
        del data["samples"]
        return data | {"warnings": list(self.warnings)}


def metric_key(tool: str, ours: str | None, statistic: str, theirs: str) -> str:
    """Our id where `ours` (a stem such as `ttft_ms`) has that statistic, else the tool's own name.

    `statistic` is `mean`, `max`, `std` or a percentile (`p50`); `theirs` the name in the tool's file.
    """
    if ours is not None and (key := f"{ours}_{statistic}") in METRICS:
        return key
    return f"{tool}:{theirs}"
