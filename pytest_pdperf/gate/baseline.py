"""The baseline file: one JSON a (hardware, engine, model, topology), strict to read and reviewable as a
diff.

Layout (sorted keys, four significant digits, one launch a line)::

    {"cells": {"fixed-shapes/in512-out256-c16": [ pin, pin, ... ]},
     "keys": {"1a2b3c4d": {gpu, gpu_count, link, ...}},
     "metrics": {"ttft_ms_p50": {"better": "lower", "unit": "ms"}},
     "schema": 1}

A pin is an accepted normal: its launches, why it was accepted, and a digest that a hand edit breaks. A cell
has at most one current pin a key; the pins before it stay as superseded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from pytest_pdperf.errors import UsageProblem

from .catalogue import Catalogue, nearest, spec_of
from .fingerprint import BaselineKey, CellRef, digest_of
from .statistics import Pooled, log_score, pool

SCHEMA = 1

Migration = Callable[[dict[str, Any]], dict[str, Any]]

MIGRATIONS: dict[int, Migration] = {}
"""From schema k to k+1. Empty while 1 is the only schema that was ever written."""

ANCHOR_LAUNCHES = 5
"""The first launches of a pin, which later ones must not creep away from."""

PROVISIONAL_BELOW = 5
"""A baseline of fewer launches is called provisional."""

Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]


class BaselineProblem(UsageProblem):
    """A baseline that cannot be trusted: names file, place, value and the way out."""

    def __init__(self, path: Path | str, what: str, way_out: str) -> None:
        super().__init__(f"baseline {path}: {what}\n  way out: {way_out}")
        self.path = path
        self.what = what


def significant(value: float, digits: int = 4) -> float:
    """Round to significant digits, so that a diff shows changes and not noise."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else value


class Strict(BaseModel):
    """Frozen; unknown keys and silently converted types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Launch(Strict):
    """One bring-up's measurements of one cell, with where they came from."""

    id: str = Field(min_length=1)
    date: AwareDatetime
    values: dict[str, Positive] = Field(min_length=1)
    """Metric id -> median over the launch's runs, in the metric's unit."""
    n: dict[str, Annotated[int, Field(ge=1, strict=True)]]
    """Metric id -> samples behind the value."""
    engine_version: str = "unknown"
    commit: str = "unknown"
    driver: str = "unknown"
    host: str = "unknown"
    """Hash of the host's name."""
    session: str = ""
    """Run id: launches of one session share the state of the machine, so their spread is the noise of a
    pair.
    """
    reason: str = ""
    environment: dict[str, str] = Field(default_factory=dict)
    """Anything else worth knowing later: clocks, router version, transport really used."""

    @field_validator("values")
    @classmethod
    def _rounded(cls, values: dict[str, float]) -> dict[str, float]:
        return {name: significant(value) for name, value in values.items()}

    @field_validator("date")
    @classmethod
    def _utc(cls, date: datetime) -> datetime:
        return date.astimezone(UTC).replace(microsecond=0)

    @model_validator(mode="after")
    def _counts_match(self) -> Launch:
        if set(self.n) != set(self.values):
            odd = ", ".join(sorted(set(self.n) ^ set(self.values)))
            raise ValueError(f"values and n must name the same metrics; only one of them has {odd}")
        return self


class Pin(Strict):
    """An accepted normal of one cell under one key."""

    key: str
    """Digest of an entry of the file's `keys`."""
    workload_digest: str
    status: Literal["current", "superseded"] = "current"
    reason: str
    superseded: str = ""
    """When and why a newer pin took over."""
    launches: tuple[Launch, ...] = Field(min_length=1)
    digest: str = ""

    @model_validator(mode="after")
    def _distinct(self) -> Pin:
        seen: set[str] = set()
        for launch in self.launches:
            if launch.id in seen:
                raise ValueError(f"launch {launch.id!r} is listed twice")
            seen.add(launch.id)
        return self

    def content_digest(self, key: BaselineKey) -> str:
        """What `digest` must be: over the pin and the key it points to."""
        return digest_of({"key": key.model_dump(), "pin": self.model_dump(mode="json", exclude={"digest"})})

    def signed(self, key: BaselineKey) -> Pin:
        """The same pin with a digest that fits it."""
        return self.model_copy(update={"digest": self.content_digest(key)})


class MetricNote(Strict):
    """Unit and direction as they were when the numbers were stored, so that a change of either is found."""

    unit: str
    better: Literal["lower", "higher"]


class BaselineFile(Strict):
    """One file of `baselines/`."""

    version: Literal[1] = Field(alias="schema")
    keys: dict[str, BaselineKey]
    metrics: dict[str, MetricNote]
    cells: dict[str, tuple[Pin, ...]]

    @model_validator(mode="after")
    def _consistent(self) -> BaselineFile:
        for digest, key in self.keys.items():
            if key.digest != digest:
                raise ValueError(f"keys.{digest}: digest does not fit its content (expected {key.digest})")
        for cell, pins in self.cells.items():
            current: set[tuple[str, str]] = set()
            for index, pin in enumerate(pins):
                place = f"cells.{cell}.{index}"
                if pin.key not in self.keys:
                    raise ValueError(f"{place}: key {pin.key!r} is not in keys")
                pair = (pin.key, pin.workload_digest)
                if pin.status == "current" and pair in current:
                    raise ValueError(f"{place}: duplicated cell, two current pins with one key")
                if pin.status == "current":
                    current.add(pair)
                for launch in pin.launches:
                    unknown = sorted(set(launch.values) - set(self.metrics))
                    if unknown:
                        raise ValueError(
                            f"{place}: launch {launch.id!r} has {unknown[0]!r}, which metrics does not list"
                        )
        return self

    @cached_property
    def hand_edited(self) -> tuple[str, ...]:
        """`cell, pin i` for every pin whose digest does not fit its content."""
        return tuple(
            f"cell {cell!r}, pin {index} ({pin.reason or 'no reason'})"
            for cell, pins in sorted(self.cells.items())
            for index, pin in enumerate(pins)
            if pin.digest != pin.content_digest(self.keys[pin.key])
        )

    def current(self, key: BaselineKey) -> dict[tuple[str, str], Pin]:
        """(cell, workload digest) -> current pin, for the pins that are comparable with `key`."""
        return {
            (cell, pin.workload_digest): pin
            for cell, pins in self.cells.items()
            for pin in pins
            if pin.status == "current" and self.keys[pin.key] == key
        }


class CellBaseline:
    """The current pin of one cell as the judge wants it: values per metric over the launches."""

    def __init__(self, ref: CellRef, pin: Pin) -> None:
        self.ref = ref
        self.pin = pin
        self._spreads: dict[tuple[str, int], Pooled] = {}

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Oldest first, as stored."""
        return self.pin.launches

    @cached_property
    def metrics(self) -> frozenset[str]:
        """Every metric that any launch has."""
        return frozenset(name for launch in self.launches for name in launch.values)

    def values(self, metric: str) -> tuple[float, ...]:
        """One value a launch that measured this metric, oldest first."""
        return tuple(launch.values[metric] for launch in self.launches if metric in launch.values)

    def spread(self, metric: str, direction: int) -> Pooled:
        """v of one metric with its B-1; kept, as every sibling asks for it."""
        place = (metric, direction)
        if place not in self._spreads:
            self._spreads[place] = pool([[log_score(value, direction) for value in self.values(metric)]])
        return self._spreads[place]

    @property
    def last_date(self) -> datetime:
        """When the newest launch was measured."""
        return max(launch.date for launch in self.launches)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} stands twice in one object")
        found[name] = value
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def loads_strict(text: str) -> Any:
    """JSON without NaN, Infinity, overflowing numbers or repeated keys; raises ValueError that says where
    or which.
    """
    return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_finite, parse_float=_finite)


RESTORE = "take the file from version control, or delete it and accept anew with --update-baselines=create"


def parse(
    path: Path,
    text: str,
    catalogue: Catalogue,
    *,
    trust_edits: bool = False,
    migrations: Mapping[int, Migration] = MIGRATIONS,
) -> BaselineFile:
    """Turn a file's text into a validated model. Raises BaselineProblem for anything that could end in a
    wrong verdict.

    `trust_edits` lets pins through whose digest does not fit (for `--update-baselines=fix`); everything
    else stays checked.
    """
    if not text.strip():
        raise BaselineProblem(path, "the file is empty", RESTORE)
    try:
        raw = loads_strict(text)
    except ValueError as error:
        raise BaselineProblem(
            path, f"not strict JSON (truncated, badly merged, not finite?): {error}", RESTORE
        ) from None
    if not isinstance(raw, dict):
        raise BaselineProblem(path, f"expected an object, got {type(raw).__name__}", RESTORE)
    raw = _migrated(path, raw, migrations)
    try:
        file = BaselineFile.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "file"
        value = first.get("input")
        shown = f" (value {value!r:.60})" if not isinstance(value, dict | BaseModel) else ""
        more = f"; {error.error_count() - 1} more" if error.error_count() > 1 else ""
        raise BaselineProblem(path, f"{place}: {first['msg']}{shown}{more}", RESTORE) from None
    _check_units(path, file, catalogue)
    if file.hand_edited and not trust_edits:
        raise BaselineProblem(
            path,
            f"{file.hand_edited[0]}: content does not fit its digest, so it was edited by hand or merged",
            "take it from version control, or re-measure with --update-baselines=fix --baseline-reason TEXT",
        )
    return file


def read(
    path: Path, catalogue: Catalogue, *, trust_edits: bool = False, shown: Path | None = None
) -> BaselineFile:
    """Read and validate a baseline file; messages call it `shown`. Raises BaselineProblem, also when it does not
    exist or cannot be read.
    """
    name = shown or path
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BaselineProblem(
            name, "the file does not exist", "accept one with --update-baselines=create"
        ) from None
    except OSError as error:
        raise BaselineProblem(name, f"cannot be read: {error.strerror or error}", RESTORE) from None
    except UnicodeDecodeError as error:
        raise BaselineProblem(name, f"cannot be read: {error}", RESTORE) from None
    return parse(name, text, catalogue, trust_edits=trust_edits)


def _migrated(path: Path, raw: dict[str, Any], migrations: Mapping[int, Migration]) -> dict[str, Any]:
    version = raw.get("schema")
    if not isinstance(version, int) or isinstance(version, bool):
        raise BaselineProblem(path, f"schema: expected a whole number, got {version!r}", RESTORE)
    if version > SCHEMA:
        raise BaselineProblem(
            path,
            f"schema {version} is newer than {SCHEMA}, the newest this version reads",
            "upgrade pytest-pdperf",
        )
    while version < SCHEMA:
        if version not in migrations:
            raise BaselineProblem(path, f"schema {version} is too old to be migrated to {SCHEMA}", RESTORE)
        raw = {**migrations[version](raw), "schema": version + 1}
        version += 1
    return raw


def _check_units(path: Path, file: BaselineFile, catalogue: Catalogue) -> None:
    for name, note in file.metrics.items():
        spec = spec_of(name, catalogue)
        if spec is None:
            continue  # the judge names a metric that no longer exists, where it is compared
        better = "lower" if spec.direction == 1 else "higher"
        if (note.unit, note.better) != (spec.unit, better):
            raise BaselineProblem(
                path,
                f"metrics.{name}: stored as {note.unit!r}, {note.better} is better; "
                f"the metric table now says {spec.unit!r}, {better} is better",
                "give the metric a new id, or delete the file and accept anew with --update-baselines=create",
            )


def note_for(metric: str, catalogue: Catalogue) -> MetricNote:
    """Unit and direction of a metric about to be stored. Raises KeyError with near names for one that no
    table has.
    """
    spec = spec_of(metric, catalogue)
    if spec is None:
        raise KeyError(f"no metric {metric!r}; nearest: {nearest(metric, catalogue) or 'none'}")
    return MetricNote(unit=spec.unit, better="lower" if spec.direction == 1 else "higher")


def dumps(file: BaselineFile) -> str:
    """The file's text: sorted keys, one launch a line, pins with the digests they have."""
    content = file.model_dump(mode="json", by_alias=True)
    return _pretty(content, 0) + "\n"


ONE_LINE = frozenset({"id", "values"})


def _pretty(value: Any, depth: int) -> str:
    """JSON with one line for every launch and every flat object."""
    pad, inner = " " * depth, " " * (depth + 1)
    nested = isinstance(value, dict) and any(isinstance(item, dict | list) for item in value.values())
    if nested and not set(value) >= ONE_LINE:
        rows = [f"{inner}{json.dumps(name)}: {_pretty(value[name], depth + 1)}" for name in sorted(value)]
        return "{\n" + ",\n".join(rows) + f"\n{pad}}}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(inner + _pretty(item, depth + 1) for item in value) + f"\n{pad}]"
    return json.dumps(value, sort_keys=True, allow_nan=False)
