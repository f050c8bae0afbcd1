"""The few pieces of SVG that our charts need, as pure functions: scales, ticks, and elements that escape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape


def element(name: str, *children: Markup | str, **attributes: object) -> Markup:
    """One element. Attribute values and plain-text children are escaped; `class_` and `stroke_width` spell `class`
    and `stroke-width`.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join([escape(child) for child in children])
    return Markup(f"<{name}{shown}>{inner}</{name}>")


def text(x: float, y: float, words: str, **attributes: object) -> Markup:
    """A text label."""
    return element("text", words, x=num(x), y=num(y), **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> Markup:
    """A straight line."""
    return element("line", x1=num(x1), y1=num(y1), x2=num(x2), y2=num(y2), **attributes)


def num(value: float) -> str:
    """A coordinate with at most one decimal: pictures need no more and files stay small."""
    shown = f"{value:.1f}"
    return shown[:-2] if shown.endswith(".0") else shown


def polyline(points: Sequence[tuple[float, float]]) -> str:
    """Path data through the points, relative after the first: shorter than absolute."""
    if not points:
        return ""
    parts = [f"M{num(points[0][0])} {num(points[0][1])}"]
    x, y = round(points[0][0], 1), round(points[0][1], 1)
    for px, py in points[1:]:
        dx, dy = round(px - x, 1), round(py - y, 1)
        if dx == 0 and dy == 0:
            continue
        parts.append(f"h{num(dx)}" if dy == 0 else f"v{num(dy)}" if dx == 0 else f"l{num(dx)} {num(dy)}")
        x, y = round(x + dx, 1), round(y + dy, 1)
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps data to coordinates, linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            low, high, value = math.log10(self.low), math.log10(self.high), math.log10(max(value, self.low))
        else:
            low, high = self.low, self.high
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the range: 1-2-5 steps, on a logarithmic axis as many decades as fit."""
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high, count)


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten between low and high."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(f for f in (1, 2, 5, 10) if f * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten where few decades are shown, powers alone where many are."""
    decades = math.log10(high / low)
    factors = (1, 2, 5) if decades <= 2.2 else (1, 3) if decades <= 3.5 else (1,)
    found = [
        f * 10.0**e
        for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for f in factors
    ]
    return [tick for tick in found if low * 0.999 <= tick <= high * 1.001]


def spread(values: Sequence[float], *, start: float, end: float, log_from: float = 8.0) -> Scale:
    """A scale that holds all values: logarithmic when the largest is `log_from` times the smallest or more.

    Values of 0 and below sit at the lower end of a logarithmic axis.
    """
    known = [value for value in values if math.isfinite(value)]
    positive = [value for value in known if value > 0]
    if not known:
        return Scale(0.0, 1.0, start, end)
    if positive and max(positive) >= log_from * min(positive):
        return Scale(min(positive) * 0.95, max(positive) * 1.05, start, end, log=True)
    low, high = min(known), max(known)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return Scale(low - margin if low > margin else 0.0, high + margin, start, end)


def from_zero(values: Sequence[float], *, start: float, end: float) -> Scale:
    """A linear scale from 0 to a little above the largest value."""
    known = [value for value in values if math.isfinite(value)]
    return Scale(0.0, (max(known, default=0.0) or 1.0) * 1.06, start, end)


def short(value: float) -> str:
    """A tick or value in few characters: 0.05, 5, 1.5k."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
