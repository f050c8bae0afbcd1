"""Reads values of foreign JSON so that none is taken for what it is not: no silent NaN, zero, string or unit."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_pdperf.errors import UsageProblem

MAX_BYTES = 2 << 30
MISSING = "not in the file"
_TO_MS = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3, "seconds": 1e3}


@dataclass(slots=True)
class Place:
    """Where in which file a reader is, and what it found odd there."""

    path: Path
    where: str = ""
    warnings: list[str] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """File and place, for messages."""
        return f"{self.path}: {self.where}" if self.where else str(self.path)

    def problem(self, text: str) -> UsageProblem:
        """An error that names this place."""
        return UsageProblem(f"{self.name}: {text}")

    def settle(self) -> tuple[str, ...]:
        """The warnings. Raises UsageProblem when the file's own numbers contradict each other."""
        if self.contradictions:
            raise self.problem(
                f"the file's numbers contradict each other ({'; '.join(self.contradictions)}); nothing is "
                "imported, measure again"
            )
        return tuple(dict.fromkeys(self.warnings))


def read_text(path: Path) -> str:
    """The file's text. Raises UsageProblem for what cannot be read."""
    try:
        if path.is_dir():
            raise UsageProblem(f"{path}: is a folder; name one result file")
        if path.stat().st_size > MAX_BYTES:
            raise UsageProblem(f"{path}: larger than {MAX_BYTES >> 30} GiB; split it")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageProblem(f"{path}: not UTF-8 text; want a result file of a benchmark tool") from None
    except OSError as error:
        raise UsageProblem(f"{path}: cannot be read: {error.strerror or error}") from None


def parse(text: str) -> Any:
    """JSON with NaN and Infinity, which these tools write; integers beyond 18 digits become floats."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) <= 18 else float(digits))


def json_object(text: str, place: Place) -> dict[str, Any]:
    """One JSON object, or an error that names the place."""
    try:
        data = parse(text)
    except (ValueError, RecursionError) as error:
        raise place.problem(f"not whole JSON ({error}); was the benchmark broken off?") from None
    if not isinstance(data, dict):
        raise place.problem(f"holds a JSON {type(data).__name__}, want an object")
    return data


def json_lines(text: str, path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Every non-empty line as an object, with its place."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            place = Place(path, f"line {number}")
            yield place, json_object(line, place)


def number(data: Mapping[str, Any], key: str, place: Place) -> tuple[float | None, str]:
    """(value, why it is unknown). Missing, null, NaN and infinite are unknown; what is no number is an error."""
    if key not in data:
        return None, MISSING
    value = data[key]
    if value is None:
        return None, "null in the file"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise place.problem(f"{key}: {value!r} is no number")
    if not math.isfinite(value):
        place.warnings.append(f"{key} is {value} in the file: taken as unknown")
        return None, f"{value} in the file"
    return float(value), ""


def count(data: Mapping[str, Any], key: str, place: Place) -> int | None:
    """A count, None when it is missing or null. Raises UsageProblem for what cannot be one."""
    value = data.get(key)
    if value is None:
        return None
    whole = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not whole or value < 0 or value != int(value):
        raise place.problem(f"{key}: {value!r} is no count")
    return int(value)


def needed_count(data: Mapping[str, Any], key: str, place: Place) -> int:
    """The same for a count without which nothing can be said."""
    value = count(data, key, place)
    if value is None:
        near = difflib.get_close_matches(key, list(data), 1)
        raise place.problem(f"{key} is missing" + (f" (there is {near[0]!r})" if near else ""))
    return value


def text_of(data: Mapping[str, Any], *keys: str) -> str:
    """The first of some strings that is there, else `unknown`."""
    for key in keys:
        if isinstance(value := data.get(key), str) and value:
            return value
    return "unknown"


def rate_of(data: Mapping[str, Any], key: str, place: Place) -> str:
    """A request rate as text: tools write infinity as a number, as `Infinity` and as the string `inf`."""
    value = data.get(key)
    if value is None:
        return "unknown"
    try:
        rate = float(value)
    except (TypeError, ValueError):
        raise place.problem(f"{key}: {value!r} is no request rate") from None
    if math.isnan(rate) or rate < 0:
        raise place.problem(f"{key}: {value!r} is no request rate")
    return "inf" if math.isinf(rate) else f"{rate:g}"


def entries(data: Mapping[str, Any], key: str, place: Place) -> list[Any] | None:
    """A list, None when it is missing or null. Raises UsageProblem for anything else."""
    value = data.get(key)
    if value is not None and not isinstance(value, list):
        raise place.problem(f"{key}: want a list, found {type(value).__name__}")
    return value


def mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A nested object, empty where there is none."""
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def to_ms(unit: object, key: str, place: Place) -> float:
    """Factor from a file's time unit to ms. Raises UsageProblem for a unit that is not known."""
    factor = _TO_MS.get(unit) if isinstance(unit, str) else None
    if factor is None:
        raise place.problem(f"{key}: unit {unit!r} is not a known unit of time (known: {', '.join(_TO_MS)})")
    return factor
