"""A folder for one run of the soak that does not stay, however the run ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_NAME = re.compile(r"pdperf-soak-(\d+)-")


@contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """An empty folder below `parent` (default: the temporary folder), gone at the end of the block.

    Ctrl-C and SIGTERM end the block too (see `end_on_sigterm`). What a run left that was killed with SIGKILL is removed
    by the next run: the folder's name holds the pid of its owner.
    """
    where = parent or Path(tempfile.gettempdir())
    for path in where.glob("pdperf-soak-*"):
        owner = _NAME.match(path.name)
        if owner is not None and not psutil.pid_exists(int(owner[1])):
            shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"pdperf-soak-{os.getpid()}-", dir=where) as name:
        yield Path(name)


def end_on_sigterm() -> None:
    """Let SIGTERM unwind this process as Ctrl-C does, so that stacks are taken down and folders removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
