"""How long a run still takes: what was guessed before it began, corrected by what of it has finished."""

from __future__ import annotations

from collections.abc import Mapping

CellKey = tuple[str, str]
"""(launch id, cell id)."""


class Remaining:
    """Seconds left of a run. Finished cells correct the guess for the open ones by one common factor."""

    def __init__(self, cells: Mapping[CellKey, float], start_ups: Mapping[str, float]) -> None:
        """Take the guessed seconds of every selected cell, and of every launch's bring-up, by launch id."""
        self._cells = dict(cells)
        self._start_ups = dict(start_ups)
        self._open = dict.fromkeys(cells)
        self._down = dict.fromkeys(start_ups)
        self._cells_taken: list[tuple[float, float]] = []
        self._start_ups_taken: list[tuple[float, float]] = []

    def came_up(self, launch: str, seconds: float) -> None:
        """A bring-up took so long."""
        if launch in self._start_ups:
            self._start_ups_taken.append((seconds, self._start_ups[launch]))
            self._down.pop(launch, None)

    def finished(self, key: CellKey, seconds: float) -> None:
        """A cell took so long, with all that belongs to it."""
        if key in self._cells:
            self._cells_taken.append((seconds, self._cells[key]))
        self.passed(key)

    def passed(self, key: CellKey) -> None:
        """A cell will not be measured any more, whatever became of it."""
        self._open.pop(key, None)

    def seconds(self, current: CellKey | None = None, elapsed_s: float = 0.0) -> float:
        """What is left while `current` has been running for `elapsed_s`."""
        factor = _factor(self._cells_taken)
        cells = factor * sum(self._cells[key] for key in self._open)
        waiting = {launch for launch, _ in self._open} & self._down.keys()
        start_ups = _factor(self._start_ups_taken) * sum(self._start_ups[launch] for launch in waiting)
        done = min(elapsed_s, factor * self._cells[current]) if current in self._open and current else 0.0
        return cells + start_ups - done


def _factor(taken: list[tuple[float, float]]) -> float:
    guessed = sum(guess for _, guess in taken)
    return sum(seconds for seconds, _ in taken) / guessed if guessed else 1.0
