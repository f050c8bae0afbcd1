"""`pdperf history`: how cells went over their launches, from `history/*.jsonl`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  pdperf history                                          every cell, one line each
  pdperf history --cell 'in4096-*' --topology 'pd-*'      some of them
  pdperf history --cell in4096-out128-c16 --topology pd-1p2d-tp2 --metric ttft_ms_p50 --plot
"""
SHOWN = ("ttft_ms_p50", "tpot_ms_p50", "output_tps")


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "history",
        help="show how cells went over their launches",
        description="Every launch on real engines is appended to history/; this shows it, with lasting steps.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", type=Path, help="history files or folders (default: history/)")
    parser.add_argument(
        "--cell", default="*", metavar="PATTERN", help="cells, shell-style: 'in512-*', 'quick/*'"
    )
    parser.add_argument("--topology", default="*", metavar="PATTERN", help="topologies, shell-style")
    parser.add_argument(
        "--metric", metavar="ID", help="one metric in detail (default: three, one line a cell)"
    )
    parser.add_argument("--last", type=int, default=20, metavar="N", help="launches listed in detail (20)")
    parser.add_argument("--plot", action="store_true", help="draw the metric over the launches")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the history. Returns 0. Raises UsageProblem for bad input."""
    from rich.text import Text

    from pytest_pdperf.report.history_view import check_metric, read_chains, select

    from .output import console

    if arguments.metric:
        check_metric(arguments.metric)
    chains, problems = read_chains(arguments.paths or [Path("history")])
    for problem in problems:
        print(f"pdperf: warning: {problem}", file=sys.stderr)
    chosen = select(chains, arguments.cell, arguments.topology)
    out = console()
    if arguments.metric or arguments.plot:
        for chain in chosen:
            _detail(out, chain, arguments)
    else:
        for place in dict.fromkeys(chain.key.place.parent for chain in chosen):
            out.print(Text(str(place), style="bold"))
            out.print(_overview([chain for chain in chosen if chain.key.place.parent == place]))
        out.print(Text("change: newest launch against the median of those before it"))
    return 0


def _overview(chains: Any) -> Any:
    """One line a cell: newest value of each metric, its change, and a sparkline."""
    from rich.table import Table
    from rich.text import Text

    from pytest_pdperf.gate.verdict import number
    from pytest_pdperf.measure.table import METRICS
    from pytest_pdperf.report.history_view import change_of_last, sparkline

    table = Table(box=None, pad_edge=False)
    for label in ("topology", "cell"):
        table.add_column(label, overflow="fold")
    table.add_column("launches", justify="right")
    for name in SHOWN:
        table.add_column(f"{METRICS[name].label}\n{METRICS[name].unit}", justify="right", no_wrap=True)
    table.add_column("newest verdict", no_wrap=True)
    for chain in chains:
        shown = []
        for name in SHOWN:
            values = [value for _, value in chain.values(name)]
            change = change_of_last(values)
            words = number(values[-1]) if values else "-"
            words += f" {change:+.0%}" if change is not None else ""
            shown.append(Text(f"{words} {sparkline(values, 12)}"))
        table.add_row(
            *(Text(part) for part in (chain.key.topology, chain.ref.id, str(len(chain.entries)))),
            *shown,
            Text(chain.entries[-1].verdict),
        )
    return table


def _detail(out: Any, chain: Any, arguments: argparse.Namespace) -> None:
    """Every launch of one cell and metric, newest last."""
    from rich.table import Table
    from rich.text import Text

    from pytest_pdperf.gate.verdict import number
    from pytest_pdperf.report.history_view import creep_lines, plot

    metric = arguments.metric or SHOWN[0]
    out.print(Text(f"{chain.key.place.parent.as_posix()}: {chain.name}", style="bold"))
    table = Table(box=None, pad_edge=False)
    for label in ("date", metric, "n", "engine", "commit", "verdict", "launch", "reason"):
        table.add_column(label, justify="right" if label in (metric, "n") else "left", overflow="fold")
    for entry in chain.entries[-max(1, arguments.last) :]:
        launch = entry.launch
        value = launch.values.get(metric) if launch else None
        table.add_row(
            *(
                Text(text)
                for text in (
                    f"{launch.date:%Y-%m-%d %H:%M}" if launch else "-",
                    number(value) if value is not None else "-",
                    str(launch.n.get(metric, "-")) if launch else "-",
                    launch.engine_version if launch else "-",
                    launch.commit[:12] if launch else "-",
                    entry.verdict,
                    entry.launch_id,
                    launch.reason if launch else "",
                )
            )
        )
    out.print(table)
    if arguments.plot:
        for line in plot(chain, metric, width=max(20, min(100, out.width - 14))):
            out.print(Text(line))
    for line in creep_lines(chain, metric):
        out.print(Text(line))
