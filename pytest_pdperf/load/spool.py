"""Bodies on disk until they are parsed, so that a long run holds stamps in memory and nothing else."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from .exchange import Exchange


class Spool:
    """Append-only store of response bodies. A full disk makes it keep them in memory and say so."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w+b", buffering=0)
        self._end = 0
        self._places: dict[int, tuple[int, int]] = {}
        self._kept: dict[int, bytes] = {}
        self.problem = ""

    def put(self, exchange: Exchange) -> None:
        """Move the body of a finished exchange out of memory."""
        body = b"".join(exchange.body)
        exchange.body = []
        exchange.payload = b""
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
