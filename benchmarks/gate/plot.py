"""A power plot without a plotting library: one SVG, readable in any browser and in a diff."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 60, 320, 40, 50
COLOURS = ("#0b5fa5", "#5aa9e6", "#c0392b", "#e67e22", "#8e44ad", "#27ae60", "#7f8c8d", "#b7950b")


def power_plot(title: str, losses: Sequence[float], curves: Mapping[str, Sequence[float]]) -> str:
    """SVG text: chance of finding a loss (0..1) against its size (0..1)."""
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    largest = max(losses)

    def at(loss: float, power: float) -> str:
        return f"{LEFT + wide * loss / largest:.1f},{TOP + high * (1 - power):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for tenth in range(0, 11, 2):
        y = TOP + high * (1 - tenth / 10)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + wide}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tenth * 10} %</text>')
    for loss in losses:
        x = LEFT + wide * loss / largest
        parts.append(f'<text x="{x:.1f}" y="{TOP + high + 18}" text-anchor="middle">{loss * 100:g}</text>')
    label = "true throughput loss, % (4 of 16 cells)"
    parts.append(f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 10}" text-anchor="middle">{label}</text>')
    for index, (name, powers) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = " ".join(at(loss, power) for loss, power in zip(losses, powers, strict=True))
        stroke = f'stroke="{colour}" stroke-width="{3 if index == 0 else 1.6}"'
        parts.append(f'<polyline points="{points}" fill="none" {stroke}/>')
        y = TOP + 16 + index * 34
        x = LEFT + wide + 14
        parts.append(f'<line x1="{x}" y1="{y - 4}" x2="{x + 22}" y2="{y - 4}" {stroke}/>')
        head, _, tail = name.partition(", at ")
        parts.append(f'<text x="{x + 28}" y="{y}">{escape(head)}</text>')
        if tail:
            parts.append(f'<text x="{x + 28}" y="{y + 14}" fill="#666">at {escape(tail)}</text>')
    return "\n".join([*parts, "</svg>", ""])
