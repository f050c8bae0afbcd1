"""What an engine says of its own start: a disk or a network that became slow shows there first."""

from __future__ import annotations

import re
from pathlib import Path

from pytest_pdperf.stack.logs import Follower

_TOOK = re.compile(r"Loading weights took ([0-9.]+) seconds")


def loading_s(log: Path) -> float | None:
    """Seconds that the weights took, by the latest such line (vLLM's) in an engine's log; None without one."""
    follower, took = Follower(log), None
    while lines := follower.new_lines():
        for line in lines:
            if found := _TOOK.search(line):
                took = float(found[1])
    return took
