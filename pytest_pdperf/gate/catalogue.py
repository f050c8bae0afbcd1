"""What the gate needs to know of a metric, so that it depends on the metric table in one place only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Protocol


class MetricSpec(Protocol):
    """The fields of `measure.table.Metric` that decide a verdict."""

    @property
    def id(self) -> str: ...
    @property
    def unit(self) -> str: ...
    @property
    def direction(self) -> int:
        """+1 lower is better, -1 higher is better."""

    @property
    def tau(self) -> float | None: ...
    @property
    def floor(self) -> float: ...
    @property
    def min_n(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def prior_sd(self) -> float:
        """Launch-to-launch standard deviation of ln(value) to assume until siblings give one."""


Catalogue = Mapping[str, MetricSpec]


def spec_of(metric: str, catalogue: Catalogue) -> MetricSpec | None:
    """The table entry of a metric; `steady.ttft_ms_p50` is `ttft_ms_p50` of the stream `steady`."""
    return catalogue.get(metric) or catalogue.get(metric.rpartition(".")[2])


def nearest(word: str, known: Iterable[str], count: int = 3) -> str:
    """`'a' or 'b'`: the known words closest to a misspelled one, or an empty string."""
    hits = difflib.get_close_matches(word, sorted(known), n=count, cutoff=0.5)
    return " or ".join(repr(hit) for hit in hits)
