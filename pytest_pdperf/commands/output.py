"""One way to a terminal for all subcommands: colour only where it is wanted, width that a table survives."""

from __future__ import annotations

import sys

from rich.console import Console

MIN_WIDTH = 140
"""Columns where output is no terminal, or a narrow one: a wrapped table cannot be read."""


def console() -> Console:
    """Standard output. Honours NO_COLOR and FORCE_COLOR, as rich does."""
    terminal = Console(file=sys.stdout, highlight=False)
    if terminal.is_terminal and terminal.width >= MIN_WIDTH:
        return terminal
    return Console(file=sys.stdout, highlight=False, width=max(MIN_WIDTH, terminal.width))
