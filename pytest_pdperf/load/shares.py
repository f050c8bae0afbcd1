"""One cell driven by several processes: which requests, clients and warm-ups are whose.

An open loop is dealt out beforehand, every n-th request to the same process, so that together they keep the one
schedule. A closed loop's requests are not: which client is free first is only known while it runs. Its processes draw
from one pile (`Tickets`), so that all clients together stay busy until the last request is issued, as in one process.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .planned import StreamPlan

_TICKET = struct.Struct("=I")


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a job that one process does; the default is all of it."""

    number: int = 0
    of: int = 1
    tickets: Mapping[str, int] = field(default_factory=dict)
    """Closed-loop stream -> descriptor of its pile; empty for a process that is alone."""

    def dealt(self, count: int) -> range:
        """Positions, out of `count`, that are this process's own."""
        return range(self.number, count, self.of)

    def clients(self, plan: StreamPlan, before: int) -> int | None:
        """Its clients of a closed-loop stream, None for an open loop.

        `before` is the number of clients of the streams dealt earlier: dealing goes on where they ended, so that no
        process has two clients more than another.
        """
        if plan.concurrency is None:
            return None
        return len(range((self.number - before) % self.of, plan.concurrency, self.of))


class Turns:
    """Positions in their order, for one process."""

    def __init__(self, positions: Iterable[int]) -> None:
        self._left = iter(positions)

    def take(self) -> int | None:
        """The next position; None when there is none left, now and ever after."""
        return next(self._left, None)


class Tickets:
    """The same for several processes: they read a file through one inherited descriptor, whose offset they share.

    Linux reads a regular file and moves the offset in one step (since 3.14), so each position is drawn exactly once.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def take(self) -> int | None:
        """The next position that no process has drawn; None when all are."""
        drawn = os.read(self._fd, _TICKET.size)
        return int(_TICKET.unpack(drawn)[0]) if drawn else None

    @staticmethod
    def open(path: Path, count: int) -> int:
        """A new pile of `count` tickets. Returns a descriptor, which the caller closes; the file has no name left."""
        path.write_bytes(b"".join(_TICKET.pack(i) for i in range(count)))
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        path.unlink()
        return fd
