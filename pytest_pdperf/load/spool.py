"""Bodies on disk until they are parsed, so that a long run holds stamps in memory and nothing else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from .exchange import Exchange


class Spool:
    """Append-only store of response bodies. A full disk makes it keep them in memory and say so.

    Answers that began together end together, and the next events wait while bodies are written: so `put` only queues,
    and `write` stores a few at a time.
    """

    def __init__(self, path: Path, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._path = path
        self._file = path.open("w+b", buffering=0)
        self._clock = clock
        self._end = 0
        self._queue: deque[Exchange] = deque()
        self._places: dict[int, tuple[int, int]] = {}
        self._kept: dict[int, bytes] = {}
        self.problem = ""

    def put(self, exchange: Exchange) -> None:
        """Take over the body of a finished exchange."""
        exchange.payload = b""
        self._queue.append(exchange)

    def write(self, for_ns: int | None = None) -> None:
        """Move queued bodies out of memory: all, or as many as are begun within `for_ns`."""
        end = self._clock() + for_ns if for_ns is not None else None
        while self._queue and (end is None or self._clock() < end):
            self._store(self._queue.popleft())

    def _store(self, exchange: Exchange) -> None:
        body = b"".join(exchange.body)
        exchange.body = []
        if not self.problem:
            try:
                written = 0
                while written < len(body):
                    written += self._file.write(body[written:] if written else body)
                self._places[id(exchange)] = (self._end, len(body))
                self._end += len(body)
                return
            except OSError as problem:
                self.problem = f"bodies kept in memory, the spool cannot be written: {problem.strerror}"
                self._file.seek(self._end)
        self._kept[id(exchange)] = body

    def get(self, exchange: Exchange) -> bytes:
        """Body of an exchange that was put."""
        self.write()
        if id(exchange) in self._kept:
            return self._kept[id(exchange)]
        offset, size = self._places[id(exchange)]
        self._file.seek(offset)
        return self._file.read(size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)
