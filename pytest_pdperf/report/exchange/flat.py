"""The flat layout `<statistic>_<name>_ms` that vLLM's and SGLang's benchmarks share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pytest_pdperf.measure.samples import percentile
from pytest_pdperf.measure.table import METRICS

from .fields import MISSING, Place, number
from .imported import ImportedMetric, metric_key

CHUNKED = 10.0
"""A mean ITL this many times the median says that tokens come in chunks."""
AGREE = 0.02
"""Largest relative distance between a statistic and the same from the file's own samples."""


@dataclass(frozen=True, slots=True)
class Family:
    """One quantity and how the file calls it."""

    theirs: str
    """As in `mean_<theirs>_ms`."""
    ours: str | None
    """Stem of our metric with the very same definition, None when there is none."""
    definition: str
    core: bool = True
    """Its median is listed as unknown when the file lacks it."""


def read_family(
    data: Mapping[str, Any], family: Family, tool: str, n: int | None, place: Place
) -> dict[str, ImportedMetric]:
    """All statistics of one family. A family that is 0 throughout had no sample: unknown, not 0."""
    pattern = re.compile(rf"(mean|median|std|min|max|p\d+(?:\.\d+)?)_{re.escape(family.theirs)}_ms\Z")
    found: dict[str, tuple[str, float | None, str]] = {}
    for key in data:
        if match := pattern.match(key):
            statistic = "p50" if match[1] == "median" else match[1]
            value, note = number(data, key, place)
            if (other := found.get(statistic)) and not _same(other[1], value):
                place.contradictions.append(f"{other[0]} is {other[1]}, {key} is {value}")
            found[statistic] = (key, value, note)
    if "p50" not in found and family.core:
        found["p50"] = (f"p50_{family.theirs}_ms", None, MISSING)
    known = {s: v for s, (_, v, _) in found.items() if v is not None and s != "std"}
    empty = bool(known) and not any(known.values())
    if not empty:
        _check(known, family, place)
    metrics = {}
    for statistic, (key, value, why) in found.items():
        note, shown = why, value
        if empty and value is not None:
            note, shown = "0 in the file: it had no sample", None
        definition = f"{statistic} of: {family.definition}"
        name = metric_key(tool, family.ours, statistic, key)
        metrics[name] = ImportedMetric(shown, "ms", definition, n if shown is not None else None, note)
    return metrics


def read_rates(
    data: Mapping[str, Any], rows: Sequence[tuple[str, str, str, str]], completed: int, place: Place
) -> dict[str, ImportedMetric]:
    """Numbers over the whole benchmark, from rows of (our name, theirs, unit, definition).

    A rate of 0 where no request succeeded was not measured: unknown, not 0.
    """
    found = {}
    for ours, theirs, unit, definition in rows:
        value, note = number(data, theirs, place)
        if value == 0 and not completed:
            value, note = None, "0 in the file: no request succeeded"
        found[ours] = ImportedMetric(value, unit, definition, completed, note)
    return found


def _check(known: Mapping[str, float], family: Family, place: Place) -> None:
    """Numbers that cannot be: negative ones, and percentiles that fall."""
    for statistic, value in known.items():
        if value < 0 or (value == 0 and statistic in ("mean", "p50") and family.theirs == "tpot"):
            place.contradictions.append(f"{statistic} {family.theirs.upper()} <= 0 ({value:g} ms)")
    ranks = sorted((float(s[1:]), v) for s, v in known.items() if s[0] == "p")
    for (low, less), (high, more) in pairwise(ranks):
        if more < less:
            place.contradictions.append(f"p{high:g} {family.theirs} {more:g} < p{low:g} {less:g}")
    mean, median = known.get("mean"), known.get("p50")
    if family.theirs == "itl" and mean and median is not None and median * CHUNKED < mean:
        place.warnings.append(
            f"median {median:g} vs mean {mean:g}: chunked tokens, its ITL percentiles mislead"
        )


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return True
    return abs(one - other) <= 1e-6 * max(abs(one), abs(other))


def check_order(data: Mapping[str, Any], first: str, whole: str, place: Place) -> None:
    """A first token cannot come after the last one: mean and median TTFT <= mean and median E2E."""
    for statistic in ("mean", "median", "p50"):
        ttft, _ = number(data, f"{statistic}_{first}_ms", place)
        e2e, _ = number(data, f"{statistic}_{whole}_ms", place)
        if ttft is not None and e2e and ttft > e2e:
            place.contradictions.append(f"{statistic} TTFT > E2E ({ttft:g} > {e2e:g} ms)")


def compare_samples(samples_ms: Sequence[float], data: Mapping[str, Any], theirs: str, place: Place) -> None:
    """The file's mean against its own samples: they differ by far when seconds and milliseconds are mixed."""
    stated, _ = number(data, f"mean_{theirs}_ms", place)
    if stated is None or not samples_ms:
        return
    mean = sum(samples_ms) / len(samples_ms)
    if abs(mean - stated) > AGREE * max(abs(mean), abs(stated)):
        place.contradictions.append(
            f"mean_{theirs}_ms is {stated:g}, its own single requests give {mean:g} ms: are units mixed?"
        )


def percentiles_from(
    samples_ms: Sequence[float], family: Family, metrics: dict[str, ImportedMetric], source: str
) -> None:
    """Fill percentiles of ours that the file lacks and its samples give."""
    if family.ours is None or not samples_ms:
        return
    for key, row in METRICS.items():
        if row.percentile is None or key.rpartition("_")[0] != family.ours:
            continue
        if key not in metrics or metrics[key].value is None:
            value = percentile(samples_ms, row.percentile)
            note = f"computed here from the file's {source}"
            metrics[key] = ImportedMetric(value, "ms", row.definition, len(samples_ms), note)
