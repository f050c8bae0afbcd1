"""Where a long run is right now, as the few lines that one looks up to: text for a log, a small area for a terminal."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import median

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pytest_pdperf.load.progress import Progress
from pytest_pdperf.stack.estimate import minutes

RATE_WINDOW_S = 5.0
"""Tokens a second are counted over this long, so that the number can be read."""
BAR_WIDTH = 24
BAD_STYLE = "bold red"


class Rate:
    """Output tokens a second over the latest progress messages of one phase."""

    def __init__(self) -> None:
        self._seen: deque[tuple[str, float, int]] = deque()

    def add(self, progress: Progress) -> None:
        """Take a message; one of another phase starts over."""
        if self._seen and (self._seen[-1][0] != progress.phase or self._seen[-1][2] > progress.tokens):
            self._seen.clear()
        self._seen.append((progress.phase, progress.elapsed_s, progress.tokens))
        while len(self._seen) > 2 and progress.elapsed_s - self._seen[1][1] >= RATE_WINDOW_S:
            self._seen.popleft()

    @property
    def tps(self) -> float | None:
        """Tokens a second; None until there is something to count."""
        if not self._seen:
            return None
        (_, begin, first), (_, end, last) = self._seen[0], self._seen[-1]
        return (last - first) / (end - begin) if end > begin and last > first else None


@dataclass(slots=True)
class Where:
    """What is going on. `doing` is empty while nothing long does."""

    doing: str = ""
    elapsed_s: float = 0.0
    stages: dict[str, str] = field(default_factory=dict)
    """Process -> what it is at, while a topology comes up."""
    progress: Progress | None = None
    tps: float | None = None
    done: int = 0
    """Finished cells of the run."""
    cells: int = 0
    """Cells of the run."""
    bad: Counter[str] = field(default_factory=Counter)
    """Verdicts so far that somebody has to look at."""
    left_s: float | None = None
    cause: str = ""
    """The fault that was named last; empty while all are well."""


def numbers(where: Where) -> list[str]:
    """Current latencies, throughput and errors of the cell: only what is known."""
    progress = where.progress
    if progress is None:
        return []
    known = []
    if progress.ttft_ms:
        known.append(f"TTFT {milliseconds(median(progress.ttft_ms))}")
    if progress.itl_ms:
        known.append(f"ITL {milliseconds(median(progress.itl_ms))}")
    if where.tps is not None:
        known.append(f"{where.tps:,.0f} tok/s")
    known.append(errors(progress.failed))
    return known


def standing(where: Where) -> list[str]:
    """How the run as a whole is doing."""
    known = [f"{where.done} of {where.cells} cells done"] if where.cells else []
    known += [f"{count} {verdict}" for verdict, count in where.bad.items()]
    if where.cause:
        known.append(f"last fault: {where.cause}")
    if where.left_s is not None:
        known.append(f"ETA {minutes(where.left_s)}")
    return known


def line(where: Where) -> str:
    """All of it in one line, for a log."""
    parts = [f"{where.doing} for {minutes(where.elapsed_s)}"]
    parts += [f"{name} {stage}" for name, stage in where.stages.items()]
    if where.progress is not None:
        parts.append(f"{where.progress.phase} {where.progress.done}/{where.progress.total}")
    return ", ".join([*parts, *numbers(where), *standing(where)])


def area(where: Where) -> RenderableType:
    """Two or three rows for a terminal; none is ever wrapped."""
    rows: list[RenderableType] = [_head(where)]
    shown = numbers(where) or [f"{name}: {stage}" for name, stage in where.stages.items()]
    if shown:
        rows.append(_row(shown))
    whole = standing(where)
    if whole:
        rows.append(_row(whole, "dim"))
    return Group(*rows)


def _head(where: Where) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, overflow="ellipsis")
    cells: list[RenderableType] = [Text(where.doing, style="bold")]
    progress = where.progress
    if progress is not None:
        bar = ProgressBar(total=max(progress.total, 1), completed=progress.done, width=BAR_WIDTH)
        cells += [bar, Text(f"{progress.phase} {progress.done}/{progress.total}")]
        cells.append(Text(f"{progress.in_flight} in flight"))
    cells.append(Text(minutes(where.elapsed_s)))
    for _ in cells[1:]:
        grid.add_column(no_wrap=True)
    grid.add_row(*cells)
    return grid


def _row(parts: list[str], style: str = "") -> Text:
    row = Text(style=style, no_wrap=True, overflow="ellipsis")
    for number, part in enumerate(parts):
        row.append("   " if number else "")
        troubled = part.endswith((" errors", " error", "FAIL", "INVALID")) and not part.startswith("0 ")
        row.append(part, style=BAD_STYLE if troubled else "")
    return row


def milliseconds(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g} ms" if value < 1000 else f"{value:,.0f} ms"


def errors(count: int) -> str:
    """Failed requests in words."""
    return "1 error" if count == 1 else f"{count} errors"
