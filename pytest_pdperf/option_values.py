"""How the text of an option becomes its value. Imports nothing heavy: pytest loads it at every start."""

from __future__ import annotations

import re


def seconds(text: str) -> float:
    """A duration in seconds, with an optional unit: `0`, `90`, `90s`, `45m`, `2h`. Raises ValueError."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    factor = units.get(text[-1:].lower())
    try:
        value = float(text[:-1]) * factor if factor else float(text)
    except ValueError:
        raise ValueError("want a time such as 90, 90s, 15m or 2h") from None
    if not 0 <= value < 1e7:
        raise ValueError("must be 0 or more")
    return value


def positive_seconds(text: str) -> float:
    """The same, but not 0. Raises ValueError."""
    value = seconds(text)
    if value == 0:
        raise ValueError("must be more than 0")
    return value


def whole_number(text: str) -> int:
    """A whole number. Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("want a whole number") from None


def nats(text: str) -> float:
    """A difference of two log-probabilities, 0 or more. Raises ValueError."""
    value = float(text)
    if not 0 <= value < 100:
        raise ValueError("must be a number of nats, 0 or more")
    return value


def positive_count(text: str) -> int:
    """A whole number of at least 1. Raises ValueError."""
    value = whole_number(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value


def count_or_auto(text: str) -> int | None:
    """A whole number from 1 to 64, or `auto`, which is None. Raises ValueError."""
    if text == "auto":
        return None
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= 64:
        raise ValueError("must be auto or a number from 1 to 64")
    return value


def gres_name(text: str) -> str:
    """`gpu` or `gpu:TYPE`, without a count. Raises ValueError."""
    if not re.fullmatch(r"[A-Za-z_]\w*(:[A-Za-z_][\w.-]*)?", text):
        raise ValueError("want a name such as gpu or gpu:h100; the topology decides how many")
    return text


def two_topologies(text: str) -> tuple[str, str]:
    """`A:B` as a pair of different names. Raises ValueError."""
    first, separator, second = (part.strip() for part in text.partition(":"))
    if not separator or not first or not second or first == second:
        raise ValueError("want two topologies, such as pd-1p2d:aggregated-3x")
    return first, second
