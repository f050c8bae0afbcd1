"""Logs cover a launch, a cell covers minutes of it: hand out only the lines that were written meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_pdperf.stack.logs import Follower


class LogWindow:
    """Remembers where each log ends now; `lines` gives what was added since, without stamps.

    Engines print transfer windows about every 10 s: the first one in here may speak of earlier transfers, and the
    last transfers of a cell may still be unprinted. Counters have neither flaw; use logs where there are none.
    """

    def __init__(self, logs: Mapping[str, Path]) -> None:
        self._followers = {name: Follower(path) for name, path in logs.items()}
        self._missing = {name for name, path in logs.items() if not path.exists()}
        for follower in self._followers.values():
            while follower.new_lines():
                pass

    def lines(self) -> dict[str, list[str] | None]:
        """Instance id -> new lines since the last call; None when there is no log."""
        found: dict[str, list[str] | None] = {}
        for name, follower in self._followers.items():
            rows: list[str] = []
            while more := follower.new_lines():
                rows += more
            if name in self._missing and not rows and not follower.path.exists():
                found[name] = None
            else:
                found[name] = rows
        return found
