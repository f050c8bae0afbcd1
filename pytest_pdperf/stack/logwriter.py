"""Writes one process's output to a bounded, stamped, masked log. Standard library only, for the reaper."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_pdperf.stack.secrets import mask

MAX_LINE = 16 * 1024
"""Longer lines are cut, in bytes."""
STAMP_LENGTH = len("2026-01-31T23:59:59.123 ")
MIDDLE, LAST = ".1", ".2"
"""Suffixes of the rotating tail, older first; the head keeps the plain name."""
CUT = "[pdperf: log full; the newest lines go on in this file's .1 and .2]"


_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f]")
"""Colours and other control characters: a log is read by people, terminals and patterns."""


def stamp(epoch_s: float) -> str:
    """Local time with milliseconds, of fixed width."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(epoch_s))
    return f"{whole}.{int(epoch_s * 1000) % 1000:03d} "


class LogWriter:
    """A head that keeps the start-up (half the cap) and a tail of two files in rotation (a quarter each).

    A full disk drops lines and never blocks the process whose output this is; `dropped` counts them.
    """

    def __init__(
        self, path: str, cap: int, secrets: Sequence[str] = (), clock: Callable[[], float] = time.time
    ) -> None:
        self.path = path
        self.cap = max(cap, 4096)
        self.secrets = tuple(secrets)
        self.clock = clock
        self.dropped = 0
        self._in_tail = False
        self._partial = b""
        self._partial_since: float | None = None
        self._fd = self._open(path)
        self._size = 0

    def feed(self, data: bytes) -> None:
        """Take raw output. Carriage returns end lines too, so progress bars do not pile up in one."""
        lines = (self._partial + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._partial = lines.pop()
        self._partial_since = self.clock() if self._partial else None
        if len(self._partial) > MAX_LINE:
            lines.append(self._partial)
            self._partial, self._partial_since = b"", None
        now = stamp(self.clock())
        out = [now + self._clean(line) for line in lines if line.strip()]
        if out:
            self._write(out)

    def flush_partial(self, after_s: float = 1.0) -> None:
        """Write a line that has waited for its end too long, such as a prompt or a last word."""
        if self._partial_since is not None and self.clock() - self._partial_since >= after_s:
            self.feed(b"\n")

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._partial:
            self.feed(b"\n")
        if self.dropped:
            self._write([f"{stamp(self.clock())}[pdperf: {self.dropped} lines could not be written]"])
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _clean(self, line: bytes) -> str:
        text = line[:MAX_LINE].decode("utf-8", "replace")
        if len(line) > MAX_LINE:
            text += f" [pdperf: {len(line) - MAX_LINE} bytes cut]"
        return mask(_ESCAPES.sub("", text), self.secrets)

    def _write(self, lines: Sequence[str]) -> None:
        data = ("\n".join(lines) + "\n").encode("utf-8", "replace")
        try:
            if self._size + len(data) > (self.cap // 4 if self._in_tail else self.cap // 2):
                self._rotate()
            view = memoryview(data)
            while view:
                done = os.write(self._fd, view)
                self._size += done
                view = view[done:]
        except OSError:
            self.dropped += len(lines)

    def _rotate(self) -> None:
        if self._fd >= 0:
            if not self._in_tail:
                os.write(self._fd, (stamp(self.clock()) + CUT + "\n").encode())
            os.close(self._fd)
            self._fd = -1
        last = Path(self.path + LAST)
        if self._in_tail:
            last.replace(self.path + MIDDLE)
        self._in_tail = True
        self._fd = self._open(str(last))
        self._size = 0

    def _open(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
