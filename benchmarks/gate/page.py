"""The study as a page of the documentation, with the machine and the day: nothing in it is typed by hand."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from .bars import Bar

INTRODUCTION = """\
# How good the gate is

Virtual nights: {series} series a night (16 cells of 6 metrics) against a baseline of {launches} launches, {nights}
nights a scenario, with noise as launches of real engines showed it (`benchmarks/gate/README.md` says from what and what
had to be assumed). In each scenario either nothing changed or one metric of some cells did.

- *red*: any series is red
- *found*: a series that truly changed is red
- *found and named*: found, and no series that did not change is red. A rule that is red every night finds everything
  and names nothing

A rule "at 1% false alarms" is the one above it with its threshold widened until one quiet night in a hundred is red.
"Unpaired" is the gate without a reference build.

Written by `python -m benchmarks.gate --page {page}` on {taken}.
"""


def machine() -> str:
    """`AMD EPYC 7543, 2 cores, load 0.4`: where times come from."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{names[0] if names else platform.machine()}, {cores} cores, load {os.getloadavg()[0]:.1f}"


def taken() -> str:
    """Day and machine of a run, for every file it writes."""
    return f"{datetime.now(UTC):%Y-%m-%d}, {machine()}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others numbers."""
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def bar_list(bars: Iterable[Bar]) -> str:
    """What was promised, one line each."""
    return table(["", "seen", "asked"], ((bar.word, bar.seen, bar.asked) for bar in bars))


def bullets(lines: Sequence[str]) -> str:
    """A list, or a word when it is empty."""
    return "\n".join(f"- {line}" for line in lines) or "None."
