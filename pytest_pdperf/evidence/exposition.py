"""Metrics pages come from processes under test: parsed once, frozen, and refused whole when in doubt."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
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


_LINE = re.compile(
    r"^(?:# TYPE ([a-zA-Z_:][a-zA-Z0-9_:]*) (counter|gauge|histogram|summary|untyped)|#[^\n]*|"
    r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{([^\n{}]*)\})? ([-+]?[0-9][0-9.eE+-]*|NaN|[-+]?Inf)(?: -?[0-9]+)?|)$",
    re.MULTILINE,
)
_HELP = re.compile(r"^# HELP ([^ \n]+)", re.MULTILINE)
_LABELS = re.compile(r'(?:[a-zA-Z_][a-zA-Z0-9_]*="[^"\\\n]*"(?:,|$))+')
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="([^"\\\n]*)"')


def parse_exposition(
    text: str | bytes,
    *,
    scraped_at: float | None = None,
    max_bytes: int = MAX_PAGE_BYTES,
    only: Collection[str] | None = None,
) -> Snapshot | Unknown:
    """Turn one metrics page into a snapshot, or say why it cannot be trusted.

    Timestamps are accepted and dropped. A page that stops in the middle of a line, that is not Prometheus
    text, that holds the same series twice with different values, or that is larger than `max_bytes` is
    Unknown as a whole: half a page reads like an engine that did half the work.

    `only` keeps series of these names and does not look at the rest of the page: for samples taken every second.
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
    if only is not None:
        text = _part_of(text, only)
    return _plain(text, scraped_at) or _collect(text, scraped_at)


def _part_of(text: str, only: Collection[str]) -> str:
    """Samples of these names and their types; the whole page where it has none of them."""
    lines = _lines_of(frozenset(only)).findall("\n" + text)
    return "".join([*lines, "\n"])[1:] if any(line[1] != "#" for line in lines) else text


@lru_cache(maxsize=16)
def _lines_of(names: frozenset[str]) -> re.Pattern[str]:
    """Lines about these names, each with the end of the line before, which is found far quicker than a line's start."""
    return re.compile(rf"\n(?:# TYPE )?(?:{'|'.join(map(re.escape, sorted(names)))})(?=[ {{])[^\n]*")


def _plain(text: str, scraped_at: float | None) -> Snapshot | None:
    """The snapshot of a page in the plain form that engines print, fifteen times as fast as the library's parser.

    None for a page with anything unusual on it, which is then the library's to read or refuse.
    """
    rows = _LINE.findall(text)
    if len(rows) != text.count("\n") + 1:
        return None
    types: dict[str, str] = {}
    series: dict[str, dict[Labels, float]] = {}
    current = last = ""
    for typed, kind, name, labels, value in rows:
        if typed:
            current = last = typed
            early = (typed, typed.removesuffix("_total"), *(typed + end for end in _PARTS))
            if typed in types or any(name in series for name in early):
                return None  # a type counts for what comes after it
            types[typed] = kind
            continue
        if not name:
            continue
        if name != last:
            apart = name != current and not (name.startswith(current) and name[len(current) :] in _PARTS)
            if apart and any(base in types for base in _bases(name)):
                return None  # a sample away from its family is another one's
            last = name
        known = series.setdefault(name, {})
        key = _labels(labels)
        if key is None or key in known:
            return None
        known[key] = float(value)
    if not types.keys() >= set(_HELP.findall(text)):
        return None  # a family without a type
    names = {"counter": str.removesuffix}
    families: dict[str, str] = {}
    for name, kind in types.items():
        if kind == "counter" and not name.endswith("_total") and name in series:
            return None  # the library gives its samples another name
        family = names[kind](name, "_total") if kind in names else name
        if family in families:
            return None
        families[family] = "unknown" if kind == "untyped" else kind
    grouped = {
        f"{name}{end}" for name, kind in types.items() if kind in ("histogram", "summary") for end in _PARTS
    }
    for name in series:
        if name not in types and name not in grouped:
            families.setdefault(name, "unknown")
    return _checked(series, families, scraped_at)


_PARTS = ("_bucket", "_count", "_sum", "_created")


def _bases(name: str) -> list[str]:
    """Names of families that a sample of this name may belong to."""
    return [name, *(name.removesuffix(end) for end in _PARTS if name.endswith(end))]


@lru_cache(maxsize=65536)
def _labels(text: str) -> Labels | None:
    """Labels of a sample, sorted; None for what only the library can read."""
    if not text:
        return ()
    if _LABELS.fullmatch(text) is None:
        return None
    found = _LABEL.findall(text)
    return tuple(sorted(found)) if len({name for name, _ in found}) == len(found) else None


def _checked(
    series: Mapping[str, Mapping[Labels, float]], types: Mapping[str, str], scraped_at: float | None
) -> Snapshot | None:
    """The snapshot, or None where `_collect` has a reason to refuse it."""
    for base, kind in types.items():
        if kind == "histogram" and f"{base}_bucket" in series and f"{base}_count" not in series:
            return None
    if not series:
        return None
    frozen = {name: tuple(Sample(*row) for row in rows.items()) for name, rows in series.items()}
    return Snapshot(series=frozen, types=types, scraped_at=scraped_at)


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
