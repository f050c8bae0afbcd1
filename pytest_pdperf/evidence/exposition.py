"""Metrics pages come from processes under test: parsed once, frozen, and refused whole when in doubt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from prometheus_client.parser import text_string_to_metric_families

MAX_PAGE_BYTES = 8 * 1024 * 1024
"""A page of a real engine is 0.05 to 0.5 MB; more than this is not a metrics page."""

RANK_LABELS = frozenset(
    ("tp_rank", "pp_rank", "moe_ep_rank", "ep_rank", "attn_tp_rank", "attn_cp_rank", "moe_dp_rank", "pid")
)
"""Labels of workers that report the same requests: their values are copies, the largest stands for all."""

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Unknown:
    """Says why a value could not be had, so that a hole is never mistaken for a zero."""

    reason: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a page. `labels` are sorted by name; `value` may be NaN or infinite: engines print that."""

    labels: Labels
    value: float

    def label(self, name: str) -> str | None:
        """Value of a label, or None when the sample does not carry it."""
        return next((value for key, value in self.labels if key == name), None)


def _frozen(series: Mapping[str, tuple[Sample, ...]]) -> Mapping[str, tuple[Sample, ...]]:
    return MappingProxyType(dict(series))


@dataclass(frozen=True)
class Snapshot:
    """One page at one moment. Keys of `series` are the names on the wire (`..._total`, `..._bucket`)."""

    series: Mapping[str, tuple[Sample, ...]]
    types: Mapping[str, str] = field(default_factory=dict)
    """Family name -> declared type; families without a `# TYPE` line are `unknown`."""
    scraped_at: float | None = None
    """Seconds on the caller's clock when the answer was complete; None when the page came from a file."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "series", _frozen(self.series))
        object.__setattr__(self, "types", MappingProxyType(dict(self.types)))

    def has(self, name: str) -> bool:
        """True when at least one sample of this exact name is on the page."""
        return name in self.series

    def select(self, name: str, where: Mapping[str, str] | None = None) -> tuple[Sample, ...]:
        """Samples of a name whose labels contain all of `where`."""
        wanted = dict(where or {})
        return tuple(
            sample
            for sample in self.series.get(name, ())
            if all(sample.label(key) == value for key, value in wanted.items())
        )


def parse_exposition(
    text: str | bytes, *, scraped_at: float | None = None, max_bytes: int = MAX_PAGE_BYTES
) -> Snapshot | Unknown:
    """Turn one metrics page into a snapshot, or say why it cannot be trusted.

    Timestamps are accepted and dropped. A page that stops in the middle of a line, that is not Prometheus
    text, that holds the same series twice with different values, or that is larger than `max_bytes` is
    Unknown as a whole: half a page reads like an engine that did half the work.
    """
    size = len(text.encode()) if isinstance(text, str) else len(text)
    if size > max_bytes:
        return Unknown(f"page of {size} bytes is larger than the limit of {max_bytes}")
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as problem:
            return Unknown(f"page is not UTF-8 text (byte {problem.start})")
    if not text.strip():
        return Unknown("page is empty")
    if not text.endswith("\n"):
        return Unknown(f"page is cut off: last line {_quote(text.rsplit(chr(10), 1)[-1])} has no end")
    return _collect(text, scraped_at)


def _collect(text: str, scraped_at: float | None) -> Snapshot | Unknown:
    series: dict[str, dict[Labels, float]] = {}
    types: dict[str, str] = {}
    try:
        for family in text_string_to_metric_families(text):
            types.setdefault(family.name, family.type)
            for sample in family.samples:
                labels: Labels = tuple(sorted(sample.labels.items()))
                value = float(sample.value)
                known = series.setdefault(sample.name, {})
                if labels in known and not _same(known[labels], value):
                    return Unknown(f"two values for {sample.name}{_braces(labels)} on one page")
                known[labels] = value
    except (ValueError, KeyError, IndexError, TypeError) as problem:
        return Unknown(f"not Prometheus text ({_quote(str(problem))}): {_quote(_first_line(text))}")
    if not series:
        return Unknown("page has no samples")
    for base, kind in types.items():
        if kind == "histogram" and f"{base}_bucket" in series and f"{base}_count" not in series:
            return Unknown(f"page is cut off: histogram {base} has buckets and no count")
    frozen = {name: tuple(Sample(*row) for row in rows.items()) for name, rows in series.items()}
    return Snapshot(series=frozen, types=types, scraped_at=scraped_at)


def _same(a: float, b: float) -> bool:
    return a == b or (a != a and b != b)  # noqa: PLR0124 - NaN equals NaN here


def _braces(labels: Labels) -> str:
    return "{" + ",".join(f'{key}="{value}"' for key, value in labels) + "}" if labels else ""


def _first_line(text: str) -> str:
    return text.lstrip().split("\n", 1)[0]


def _quote(text: str) -> str:
    clean = re.sub(r"[^\x20-\x7e]", "?", text)
    return repr(clean if len(clean) <= 80 else clean[:77] + "...")
