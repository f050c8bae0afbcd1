"""The pictures of a report, each a pure function from numbers to one inline SVG: colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from .samples import Floats, Lane, Samples, thin
from .svg import Scale, element, from_zero, line, num, polyline, short, spread, text

WIDTH, HEIGHT = 440, 236
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 36

SMALL_WIDTH, SMALL_HEIGHT = 290, 190
"""Charts over concurrency stand four in a row."""

LANES_WIDTH = 960
LANES_LEFT = 34

COLOURS = 8
"""Series colours that the style sheet defines; more series start over with another dash."""

DEPTH_LABELS = (
    (0.5, "p50"),
    (0.9, "p90"),
    (0.95, "p95"),
    (0.99, "p99"),
    (0.999, "p99.9"),
    (0.9999, "p99.99"),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture with what is said below it."""

    title: str
    picture: Markup
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart: where its colour comes from, and what it is called."""

    label: str
    colour: int
    variant: int = 0
    """0 is solid, 1.. are dashes: launches, streams or percentiles of one colour."""

    @property
    def style(self) -> str:
        """Classes of the style sheet."""
        dash = self.variant + self.colour // COLOURS
        return f"c{self.colour % COLOURS}" + (f" d{min(dash, 3)}" if dash else "")


def ecdf(samples: Sequence[tuple[Curve, Floats]], what: str, unit: str = "ms") -> Markup:
    """Cumulative distribution with a logarithmic tail: p90, p99 and p99.9 lie as far apart as they matter.

    `samples` are sorted. Many samples are thinned evenly along the drawn axis; the largest is always there. Below the
    first percentile values pile up at the left edge, so that a few merged events do not stretch the axis.
    """
    shown = [(curve, values) for curve, values in samples if values.size]
    if not shown:
        return missing(f"no sample of {what}")
    deepest = max(math.log10(2 * values.size) for _, values in shown)
    x = spread(
        [
            float(v)
            for _, values in shown
            for v in (values[values.size // 100], values[values.size // 2], values[-1])
        ],
        start=LEFT,
        end=WIDTH - RIGHT,
    )
    y = Scale(0.0, max(deepest, 0.6), HEIGHT - BOTTOM, TOP)
    parts = [_x_axis(x, f"{what}, {unit}"), line(LEFT, y(0), LEFT, TOP, class_="axis")]
    for share, label in DEPTH_LABELS:
        depth = -math.log10(1 - share)
        if depth <= y.high and (share != 0.95 or y.high < 2.6):
            parts.append(line(LEFT, y(depth), WIDTH - RIGHT, y(depth), class_="grid"))
            parts.append(text(LEFT - 5, y(depth) + 3.5, label, class_="tick end"))
    for curve, values in shown:
        parts.append(_step_curve(curve, values, x, y, what, unit))
    return _picture(parts, f"Distribution of {what}")


def _step_curve(curve: Curve, values: Floats, x: Scale, y: Scale, what: str, unit: str) -> Markup:
    kept, positions = thin(values)
    points: list[tuple[float, float]] = [(x(float(kept[0])), y(0.0))]
    for value, position in zip(kept, positions, strict=True):
        px, py = x(float(value)), y(-math.log10(1 - position))
        points += [(px, points[-1][1]), (px, py)]
    quantiles = ", ".join(
        f"p{p:g} {short(float(np.percentile(values, p)))}"
        for p in (50, 90, 99)
        if values.size >= 100 / (101 - p)
    )
    words = (
        f"{curve.label}: {what}, n={values.size}; {quantiles}, largest {short(float(values[-1]))} {unit}. Share of "
        "samples at or below each value; the axis is logarithmic towards 100 %"
    )
    path = element("path", d=polyline(points), class_="curve")
    hit = element("path", d=polyline(points), class_="hit")
    return element("g", element("title", words), path, hit, class_=curve.style)


def lanes(samples: Samples, curve: Curve, span_ms: float) -> Markup:
    """A swim lane a request: waiting for the first token, then a mark a token event; stalls stand out.

    Marks closer than a pixel merge, so the size of the picture does not grow with the number of tokens.
    """
    count = len(samples.lanes)
    pitch = 9 if count <= 24 else 7 if count <= 48 else 5
    height = TOP + pitch * count + 30
    x = Scale(0.0, span_ms or 1.0, LANES_LEFT, LANES_WIDTH - 8)
    parts = []
    for tick in x.ticks(8):
        parts.append(line(x(tick), TOP - 4, x(tick), TOP + pitch * count, class_="grid"))
        parts.append(text(x(tick), TOP + pitch * count + 13, f"{tick / 1000:g}", class_="tick mid"))
    parts.append(text(LANES_WIDTH - 8, height - 3, "seconds since the first request", class_="tick end"))
    for row, lane in enumerate(samples.lanes):
        middle = TOP + pitch * row + pitch / 2
        parts.append(_lane(lane, samples, x, middle, pitch))
        if row % max(1, round(40 / pitch)) == 0:
            parts.append(text(LANES_LEFT - 6, middle + 3.5, str(lane.index), class_="tick end"))
    return element(
        "svg",
        *parts,
        viewBox=f"0 0 {LANES_WIDTH} {height}",
        class_=f"lanes p{pitch} {curve.style}",
        role="img",
        aria_label=f"Token timeline of {curve.label}",
    )


def _lane(lane: Lane, samples: Samples, x: Scale, y: float, pitch: int) -> Markup:
    stream = samples.streams.index(lane.stream)
    sent, first = x(lane.sent_ms), x(float(lane.events_ms[0]) if lane.events_ms.size else lane.end_ms)
    parts = [element("path", d=f"M{num(sent)} {num(y)}h{num(max(0.5, first - sent))}", class_="wait")]
    if marks := _marks(lane.events_ms, x, y):
        parts.append(element("path", d=marks, class_="mark" + (f" s{min(stream, 2)}" if stream else "")))
    stalls = _stalls(lane, samples.stall_ms)
    data = "".join(f"M{num(x(a))} {num(y)}H{num(max(x(b), x(a) + 1))}" for a, b in stalls)
    if data:
        parts.append(element("path", d=data, class_="stall"))
    if lane.status != "ok":
        parts.append(text(x(lane.end_ms) + 2, y + 3.5, f"✕ {lane.status}", class_="failed"))
    words = _lane_words(lane, stalls, named=len(samples.streams) > 1)
    return element("g", element("title", words), *parts)


def _marks(events_ms: Floats, x: Scale, y: float) -> str:
    """Path data of the runs of neighbouring pixels that hold at least one token event."""
    if not events_ms.size:
        return ""
    per_ms = (x.end - x.start) / (x.high - x.low)
    pixels = np.rint(x.start + (events_ms - x.low) * per_ms).astype(np.int64)
    unique = np.unique(pixels)
    cuts = np.flatnonzero(np.diff(unique) > 1) + 1
    parts: list[str] = []
    end = 0
    for run in np.split(unique, cuts):
        start, length = int(run[0]), int(run[-1] - run[0]) + 1
        parts.append(f"M{start} {num(y)}h{length}" if not parts else f"m{start - end} 0h{length}")
        end = start + length
    return "".join(parts)


def _stalls(lane: Lane, stall_ms: float | None) -> list[tuple[float, float]]:
    if not stall_ms or lane.events_ms.size < 2:
        return []
    long = np.flatnonzero(np.diff(lane.events_ms) > stall_ms)
    return [(float(lane.events_ms[i]), float(lane.events_ms[i + 1])) for i in long]


def _lane_words(lane: Lane, stalls: Sequence[tuple[float, float]], named: bool) -> str:
    words = [f"request {lane.index}" + (f" of {lane.stream}" if named else "")]
    if lane.status != "ok":
        words.append(f"{lane.status}: {lane.error[:160]}" if lane.error else lane.status)
    if lane.events_ms.size:
        words.append(f"TTFT {short(float(lane.events_ms[0]) - lane.sent_ms)} ms")
        words.append(f"{lane.events_ms.size} token events")
    if lane.events_ms.size > 1:
        words.append(f"longest gap {short(float(np.diff(lane.events_ms).max()))} ms")
    if stalls:
        words.append(f"{len(stalls)} stalls")
    return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Point:
    """One measured cell on a chart over concurrency."""

    x: float
    y: float
    words: str


def over_concurrency(
    curves: Sequence[tuple[Curve, Sequence[Point]]], what: str, knees: Mapping[str, float]
) -> Markup:
    """A value over concurrency, on a logarithmic axis of clients; a ring marks the knee of each topology."""
    shown = [(curve, points) for curve, points in curves if points]
    if not shown:
        return missing(f"{what} was not measured")
    positions = sorted({point.x for _, points in shown for point in points})
    x = Scale(positions[0] / 1.15, positions[-1] * 1.15, LEFT, SMALL_WIDTH - RIGHT, log=True)
    values = [point.y for _, points in shown for point in points]
    wide = min(values) > 0 and max(values) > 20 * min(values)
    y = (spread if wide else from_zero)(values, start=SMALL_HEIGHT - BOTTOM, end=TOP)
    parts: list[Markup] = []
    for tick in y.ticks(4):
        parts.append(line(LEFT, y(tick), SMALL_WIDTH - RIGHT, y(tick), class_="grid"))
        parts.append(text(LEFT - 5, y(tick) + 3.5, short(tick), class_="tick end"))
    for position in positions:
        parts.append(text(x(position), SMALL_HEIGHT - BOTTOM + 14, short(position), class_="tick mid"))
    parts.append(line(LEFT, y.start, SMALL_WIDTH - RIGHT, y.start, class_="axis"))
    parts.append(text(SMALL_WIDTH - RIGHT, SMALL_HEIGHT - 4, "concurrency", class_="tick end"))
    for curve, points in shown:
        places = [(x(p.x), y(p.y)) for p in points]
        inner = [element("path", d=polyline(places), class_="curve")]
        for point, (px, py) in zip(points, places, strict=True):
            if knees.get(curve.label) == point.x:
                inner.append(element("circle", cx=num(px), cy=num(py), r=8, class_="knee"))
            inner.append(
                element(
                    "circle",
                    element("title", point.words),
                    cx=num(px),
                    cy=num(py),
                    r=3.5,
                    class_="dot",
                )
            )
        parts.append(element("g", *inner, class_=curve.style))
    return _picture(parts, f"{what} over concurrency", SMALL_WIDTH, SMALL_HEIGHT)


def over_time(
    curves: Sequence[tuple[Curve, Sequence[Point]]], what: str, marks: Sequence[tuple[float, str]] = ()
) -> Markup:
    """A value over the seconds of a cell, a line a device; `marks` are (second, words) of moments to be seen."""
    shown = [(curve, points) for curve, points in curves if points]
    if not shown:
        return missing(f"{what} was not measured")
    last = max([point.x for _, points in shown for point in points] + [second for second, _ in marks])
    x = Scale(0.0, last or 1.0, LEFT, SMALL_WIDTH - RIGHT)
    base = SMALL_HEIGHT - BOTTOM
    y = spread([point.y for _, points in shown for point in points], start=base, end=TOP, log_from=math.inf)
    parts: list[Markup] = []
    for tick in y.ticks(4):
        parts.append(line(LEFT, y(tick), SMALL_WIDTH - RIGHT, y(tick), class_="grid"))
        parts.append(text(LEFT - 5, y(tick) + 3.5, short(tick), class_="tick end"))
    parts += [text(x(tick), base + 14, short(tick), class_="tick mid") for tick in x.ticks(4)]
    parts.append(line(LEFT, base, SMALL_WIDTH - RIGHT, base, class_="axis"))
    parts.append(text(SMALL_WIDTH - RIGHT, SMALL_HEIGHT - 4, "seconds", class_="tick end"))
    for curve, points in shown:
        path = polyline([(x(point.x), y(point.y)) for point in points])
        low, high = min(p.y for p in points), max(p.y for p in points)
        title = element("title", f"{curve.label}: {what} {short(low)} to {short(high)}; {points[-1].words}")
        drawn = (element("path", d=path, class_="curve"), element("path", d=path, class_="hit"))
        parts.append(element("g", title, *drawn, class_=curve.style))
    for second, words in marks:
        mark = line(x(second), base - 9, x(second), base, class_="hot")
        parts.append(element("g", element("title", f"throttled at {second:.0f} s, {words}"), mark))
    return _picture(parts, f"{what} over time", SMALL_WIDTH, SMALL_HEIGHT)


def stage_bars(rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], stages: Sequence[str]) -> Markup:
    """Stacked bars of (stage, ms, words), one a topology, on one axis: which part of the TTFT is what."""
    widest = max((sum(ms for _, ms, _ in parts) for _, parts in rows), default=0.0)
    if widest <= 0:
        return missing("no stage of the TTFT is known")
    height = 40 * len(rows) + 26
    x = Scale(0.0, widest * 1.02, 4, LANES_WIDTH - 8)
    parts: list[Markup] = []
    for number, (label, pieces) in enumerate(rows):
        top, at = 40 * number + 16, 0.0
        parts.append(text(4, top - 4, label, class_="tick strong"))
        for stage, ms, words in pieces:
            style = f"stage g{stages.index(stage)}" if stage in stages else "stage gx"
            width = x(at + ms) - x(at)
            inner = [
                element("title", words),
                element("rect", x=num(x(at)), y=top, width=num(max(width, 0.5)), height=17),
            ]
            if width > 7 * len(stage) + 8:
                inner.append(text(x(at) + 4, top + 12.5, stage.replace("_", " "), class_="inside"))
            parts.append(element("g", *inner, class_=style))
            at += ms
    base = 40 * len(rows) + 8
    parts += [text(x(t), base + 12, short(t), class_="tick mid") for t in x.ticks(6)[1:]]
    parts.append(text(LANES_WIDTH - 8, base + 12, "ms", class_="tick end"))
    return element(
        "svg",
        *parts,
        viewBox=f"0 0 {LANES_WIDTH} {height}",
        class_="stages",
        role="img",
        aria_label="Stages of the TTFT",
    )


def missing(reason: str) -> Markup:
    """What stands where a picture cannot: the reason."""
    return element("p", reason, class_="hole")


def _x_axis(x: Scale, label: str) -> Markup:
    base = HEIGHT - BOTTOM
    parts = [line(LEFT, base, WIDTH - RIGHT, base, class_="axis")]
    last = -math.inf
    for tick in x.ticks(6):
        if x(tick) - last < 26:
            continue
        last = x(tick)
        parts.append(line(x(tick), TOP, x(tick), base, class_="grid"))
        parts.append(text(x(tick), base + 14, short(tick), class_="tick mid"))
    parts.append(text(WIDTH - RIGHT, HEIGHT - 4, label + (" (log)" if x.log else ""), class_="tick end"))
    return Markup("").join(parts)


def _picture(parts: Sequence[Markup], label: str, width: int = WIDTH, height: int = HEIGHT) -> Markup:
    box = f"0 0 {width} {height}"
    return element("svg", *parts, viewBox=box, class_="chart", role="img", aria_label=label)
