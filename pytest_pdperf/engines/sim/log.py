"""Log lines in the shape of vLLM's, so that the same readers read them. The first one says SIMULATED."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from http import HTTPStatus

WINDOW_S = 10.0


class Log:
    """Writes whole lines, each at once, to one stream."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self._write = write or _stdout
        self._pid = os.getpid()

    def info(self, message: str) -> None:
        """A line of the engine."""
        self._line("INFO", message)

    def warning(self, message: str) -> None:
        """Something a user should see."""
        self._line("WARNING", message)

    def error(self, message: str) -> None:
        """What went wrong; the first one is the root cause."""
        self._line("ERROR", message)

    def transfer_engine(self, transport: str) -> None:
        """What Mooncake's native part says of its transport, in the form of its own logger (glog)."""
        stamp = time.strftime("%m%d %H:%M:%S")
        self._write(
            f"I{stamp}.000000 {self._pid} {transport}_transport.cpp:1] {transport} transport (simulated)\n"
        )

    def access(self, peer: str, method: str, path: str, version: str, status: int) -> None:
        """An access line as uvicorn prints it."""
        try:
            phrase = HTTPStatus(status).phrase
        except ValueError:
            phrase = ""
        self._write(f'INFO:     {peer} - "{method} {path} HTTP/{version}" {status} {phrase}\n')

    def _line(self, level: str, message: str) -> None:
        stamp = time.strftime("%m-%d %H:%M:%S")
        self._write(f"(SimEngine pid={self._pid}) {level} {stamp} [sim.py:1] {message}\n")


def _stdout(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        pass  # A full disk or a closed pipe must not stop the engine.
