"""`pdperf`: everything around a run that is not a test."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .errors import UsageProblem


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns 0, 1 when a shown run has blocking verdicts, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="pdperf", description="Around pytest-pdperf runs.")
    parser.add_argument("--version", action="version", version=f"pdperf {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    report = commands.add_parser("report", help="show the table of a finished or broken-off run")
    report.add_argument("run", type=Path, help="folder of the run, below pdperf-results/")
    arguments = parser.parse_args(argv)
    try:
        return _report(arguments.run)
    except UsageProblem as problem:
        print(f"pdperf: {problem}", file=sys.stderr)
        return 2


def _report(run: Path) -> int:
    from .report.outcomes import load
    from .report.terminal import render_table

    cells = run / "cells"
    if not cells.is_dir():
        raise UsageProblem(f"{run}: not the folder of a run ({cells} is missing)")
    outcomes, problems = load(cells)
    for problem in problems:
        print(f"pdperf: warning: {problem}", file=sys.stderr)
    if not outcomes:
        raise UsageProblem(f"{run}: no cell was finished")
    print(render_table(outcomes, colour=sys.stdout.isatty()))
    return 1 if any(outcome.verdict in ("FAIL", "INVALID") for outcome in outcomes) else 0
