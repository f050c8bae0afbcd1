"""Rooms in which SGLang's two roles meet: two live requests in one room get each other's KV, or end the scheduler."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LIMIT = 2**63
"""Rooms are 0 <= room < LIMIT: what every router and engine reads as a signed 64-bit number."""


class Rooms:
    """Hands out rooms that no other live request of this process has.

    They come from the operating system and from nothing that a request says: a missing or repeated request id, or a
    seed that prompts are drawn with, would give two requests, or two processes, the same room.
    """

    def __init__(self, draw: Callable[[], int] = lambda: secrets.randbelow(LIMIT)) -> None:
        self._draw = draw
        self._live: set[int] = set()
        self._lock = threading.Lock()

    @contextmanager
    def live(self, samples: int = 1) -> Iterator[tuple[int, ...]]:
        """Rooms for one request, one for each of its parallel samples, taken until it has ended."""
        taken: list[int] = []
        with self._lock:
            while len(taken) < samples:
                room = self._draw()
                if room not in self._live:
                    self._live.add(room)
                    taken.append(room)
        try:
            yield tuple(taken)
        finally:
            with self._lock:
                self._live.difference_update(taken)


ROOMS = Rooms()
"""Of this process."""
