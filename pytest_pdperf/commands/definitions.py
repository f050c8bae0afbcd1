"""`pdperf report --definitions`: the same stamps under another tool's formulas."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def show_definitions(arguments: argparse.Namespace, runs: list[Any]) -> int:
    """Print a table a cell. Returns 0, or 1 when a cell has no records to recompute from.

    Raises UsageProblem for an unknown tool, for more than one run, and when no cell has records.
    """
    from rich.table import Table
    from rich.text import Text

    from pytest_pdperf.errors import UsageProblem
    from pytest_pdperf.gate.verdict import number
    from pytest_pdperf.measure.alternatives import populations
    from pytest_pdperf.report.exchange.chosen import choose
    from pytest_pdperf.report.exchange.definitions import definition_tables

    from .output import console

    tool = arguments.definitions
    populations(tool)
    if len(runs) != 1:
        raise UsageProblem(f"--definitions {tool}: recomputes one run, {len(runs)} are given")
    for flag in ("html", "md", "json"):
        if getattr(arguments, flag):
            raise UsageProblem(f"--{flag}: cannot be written with --definitions; export the run instead")
    out = console()
    missing, shown = [], 0
    for chosen in choose(runs[0]):
        if chosen.records is None:
            missing.append(f"{chosen.name}: {chosen.missing}")
            continue
        for found in definition_tables(chosen, tool):
            shown += 1
            table = Table(box=None, pad_edge=False)
            for label in (f"{tool}'s name", "unit", f"as {tool}", "n", "ours", "difference", "our metric"):
                side = "left" if label in (f"{tool}'s name", "unit", "our metric") else "right"
                table.add_column(label, justify=side, no_wrap=True)  # type: ignore[arg-type]
            table.add_column(f"{tool}'s definition", overflow="fold")
            for row in found.rows:
                texts = (
                    row.name,
                    row.unit,
                    number(row.value) if row.value is not None else "?",
                    str(row.n),
                    number(row.our_value) if row.our_value is not None else "-",
                    f"{row.change:+.2%}" if row.change is not None else "-",
                    row.ours or "no such",
                    row.definition,
                )
                table.add_row(*(Text(text) for text in texts))
            out.print(Text(f"{found.name}{' INVALID' if found.invalid else ''}", style="bold"))
            out.print(table)
    if not shown:
        raise UsageProblem(f"--definitions {tool}: no cell can be recomputed: {'; '.join(missing)}")
    out.print(Text("both columns are made from our stamps; what a tool's own client adds is not in them"))
    for line in missing:
        print(f"pdperf: warning: {line}", file=sys.stderr)
    return int(bool(missing))
