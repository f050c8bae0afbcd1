"""Tells the one who waits where the run is: an area on a terminal, now and then a line in a log, nothing under -q."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import RenderableType

from .load.progress import Progress
from .report.live import Rate, Where, area, line
from .stack.eta import CellKey, Remaining

REDRAW_S = 0.25
FIRST_LINE_S = 15.0
"""Between two lines in a log during the first ten minutes; later a fortieth of the time the run has taken.

So ten minutes bring at most 40 lines, and every time the run gets e times longer brings 40 more: eight hours, 200."""
LINES_AN_E_FOLD = 40

NARRATED_AFTER_S = 15.0
"""A bring-up that takes longer tells its stages without -v."""

BAD = ("FAIL", "INVALID", "SUSPECT")


class Screen(Protocol):
    """Where words go."""

    @property
    def live(self) -> bool:
        """An area can be redrawn here."""

    def line(self, text: str, detail: bool = False) -> None:
        """Write a line that stays; `detail` is for those who asked for more."""

    def draw(self, renderable: RenderableType) -> None:
        """Show an area in place of the one before."""

    def erase(self) -> None:
        """Take the area away, with the cursor where it was before."""


class Narrator:
    """Follows a run. Called as a function it writes a line; all else only moves what is shown meanwhile."""

    def __init__(self, screen: Screen, clock: Callable[[], float] = time.monotonic) -> None:
        self._screen = screen
        self._clock = clock
        self._began = clock()
        self._where = Where()
        self._since = 0.0
        self._rate = Rate()
        self._numbers: dict[CellKey, int] = {}
        self._done: set[CellKey] = set()
        self._current: CellKey | None = None
        self._remaining: Callable[[], Remaining] | None = None
        self._left: Remaining | None = None
        self._verdicts: dict[str, str] = {}
        self._cause = ""
        self._drawn = -REDRAW_S
        self._told = self._began

    def __call__(self, text: str, detail: bool = False) -> None:
        """Write a line that stays."""
        if not detail:
            self._told = self._clock()
        self._screen.line(f"pdperf: {text}", detail)

    def plan(self, cells: Sequence[CellKey], remaining: Callable[[], Remaining]) -> None:
        """Say which cells the run will measure, in their order; `remaining` is asked once, when it is needed."""
        self._numbers = {key: number for number, key in enumerate(cells, 1)}
        self._remaining = remaining

    # -- what goes on --------------------------------------------------------------------------------------

    @contextmanager
    def bringing_up(self, launch: str) -> Generator[None]:
        """Everything in here is a topology's start."""
        doing = f"bringing up {launch}"
        self._forecast()
        self(doing, detail=self._screen.live)
        with self._during(doing):
            yield
            if self._left is not None:
                self._left.came_up(launch, self._clock() - self._since)

    @contextmanager
    def measuring(self, launch: str, cell: str) -> Generator[None]:
        """Everything in here is the measurement of one cell."""
        key = (launch, cell)
        number = self._numbers.get(key)
        which = f"cell {number} of {len(self._numbers)}: " if number else "fresh launch: "
        self._current = key
        self._forecast()
        if number:
            self._pass(number - 1)
        try:
            with self._during(f"{which}{launch} {cell}"):
                yield
                if self._left is not None:
                    self._left.finished(key, self._clock() - self._since)
        finally:
            self._current = None
            if number:
                self._pass(number)

    def _forecast(self) -> None:
        if self._left is None and self._remaining is not None:
            self._left = self._remaining()

    def _pass(self, number: int) -> None:
        """The first `number` cells are over, also those whose topology did not come up."""
        self._done = set(list(self._numbers)[:number])
        if self._left is not None:
            for key in self._done:
                self._left.passed(key)

    @contextmanager
    def _during(self, doing: str) -> Generator[None]:
        self._where = Where(doing)
        self._since = self._clock()
        self._rate = Rate()
        self.tick()
        try:
            yield
        finally:
            self._where = Where()
            self._screen.erase()

    def stage(self, text: str) -> None:
        """`process: stage` of a start-up, or what else it is at."""
        process, colon, stage = text.partition(": ")
        if colon:
            self._where.stages[process] = stage
        else:
            self._where.stages = {"": text}
        early = self._clock() - self._since < NARRATED_AFTER_S
        self(text, detail=early or self._screen.live)
        self.tick()

    def progress(self, progress: Progress) -> None:
        """The load process has spoken."""
        self._where.progress = progress
        self._rate.add(progress)
        self.tick()

    def judged(self, nodeid: str, verdict: str, causes: Sequence[str] = ()) -> None:
        """A cell has a verdict, or another one than before, with a line for each fault behind it."""
        self._verdicts[nodeid] = verdict
        self._cause = next(iter(causes), self._cause)

    # -- what is shown -------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Bring what is shown up to date, if it is time; called as often as anybody likes."""
        now = self._clock()
        if not self._where.doing:
            return
        if self._screen.live:
            if now - self._drawn >= REDRAW_S:
                self._drawn = now
                self._screen.draw(area(self._seen(now)))
        elif now - self._told >= max(FIRST_LINE_S, (now - self._began) / LINES_AN_E_FOLD):
            self(line(self._seen(now)))

    def sleep(self, seconds: float) -> None:
        """Wait, for somebody who polls, with the view kept up to date."""
        self.tick()
        time.sleep(seconds)

    def _seen(self, now: float) -> Where:
        where = self._where
        where.elapsed_s = now - self._since
        where.tps = self._rate.tps
        where.done, where.cells = len(self._done), len(self._numbers)
        counts = Counter(self._verdicts.values())
        where.bad = Counter({verdict: counts[verdict] for verdict in BAD if counts[verdict]})
        where.cause = self._cause
        if self._left is not None and self._done != self._numbers.keys():
            where.left_s = self._left.seconds(self._current, where.elapsed_s)
        return where
