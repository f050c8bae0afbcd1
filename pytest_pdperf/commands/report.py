"""`pdperf report`: show and compare finished runs, broken-off ones and published tables."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  pdperf report                                   the newest run below pdperf-results/
  pdperf report RUN --html report.html            one page with every picture
  pdperf report OLD NEW --md compare.md           two runs side by side
  pdperf report RUN --published                   beside the published H100 table
  pdperf report RUN table.json --html out.html    beside a published table of your own
  pdperf report RUN --definitions vllm            what vLLM's formulas make of the same stamps
"""


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "report",
        help="show a run, or compare runs",
        description="Shows runs side by side and writes them as HTML, Markdown or JSON.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="id or folder of a run, or JSON of a published table (the newest run)",
    )
    parser.add_argument(
        "--results", type=Path, default=Path("pdperf-results"), help="where runs lie (pdperf-results)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")
    parser.add_argument("--md", type=Path, metavar="FILE", help="write Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write summary.json (one run only)")
    parser.add_argument(
        "--published",
        nargs="?",
        const="h100-qwen3-32b",
        metavar="NAME",
        help="put a shipped published table beside the runs (default: h100-qwen3-32b)",
    )
    parser.add_argument(
        "--definitions",
        metavar="TOOL",
        help="recompute a run with another tool's definitions: vllm, sglang, aiperf or guidellm",
    )
    parser.add_argument("--quiet", action="store_true", help="print no table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show and write. Returns 1 when a shown run has blocking verdicts, else 0. Raises UsageProblem."""
    from pytest_pdperf.errors import UsageProblem
    from pytest_pdperf.report.grid import build_grid
    from pytest_pdperf.report.screen import comparison_table
    from pytest_pdperf.report.source import folder_of, open_source
    from pytest_pdperf.report.summary_json import summary_of
    from pytest_pdperf.report.sweep import sweep_lines

    from .output import console

    paths = [folder_of(path, arguments.results) for path in arguments.runs] or (
        [] if arguments.published else [newest(arguments.results)]
    )
    if arguments.published:
        paths.append(shipped_table(arguments.published))
    runs = [open_source(path) for path in paths]
    measured = [one for one in runs if not one.published]
    if arguments.json and len(measured) != 1:
        raise UsageProblem(f"--json: describes one run, {len(measured)} are given")
    for one in runs:
        for problem in one.problems:
            print(f"pdperf: warning: {one.name}: {problem}", file=sys.stderr)
    if arguments.definitions:
        from .definitions import show_definitions

        return show_definitions(arguments, runs)
    if not arguments.quiet:
        out = console()
        grid = build_grid(runs)
        if grid.rows:
            out.print(comparison_table(grid, colour=out.color_system is not None))
            for one in measured:
                whose = f"{one.name}: " if len(measured) > 1 else ""
                for line in sweep_lines(one.outcomes):
                    out.print(f"sweep: {whose}{line}", markup=False, highlight=False, soft_wrap=True)
        else:
            print("pdperf: no cell was measured", file=sys.stderr)
    _write(arguments, runs, measured)
    summaries = [summary_of(one) for one in measured]
    return int(any(summary["exit"]["blocking_cells"] for summary in summaries))


def _write(arguments: argparse.Namespace, runs: list[Any], measured: list[Any]) -> None:
    """The files that were asked for. Raises UsageProblem where one cannot be written."""
    from pytest_pdperf.errors import UsageProblem
    from pytest_pdperf.report.html import write_html
    from pytest_pdperf.report.markdown import write_markdown
    from pytest_pdperf.report.summary_json import summary_of, write_summary_json

    for flag, path in (("--html", arguments.html), ("--md", arguments.md), ("--json", arguments.json)):
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if flag == "--html":
                write_html(runs, path)
            elif flag == "--md":
                write_markdown(runs, path)
            else:
                write_summary_json(summary_of(measured[0]), path)
        except OSError as problem:
            raise UsageProblem(f"{flag} {path}: cannot be written: {problem.strerror or problem}") from None
        print(f"wrote {path}")


def newest(results: Path) -> Path:
    """The run that was started last. Raises UsageProblem where there is none."""
    from pytest_pdperf.errors import UsageProblem

    runs = sorted(
        (path for path in results.glob("*") if (path / "cells").is_dir()), key=lambda path: path.name
    )
    if not runs:
        raise UsageProblem(
            f"{results}: no run here; measure one (pytest -m pd --engine sim) or name its folder"
        )
    return runs[-1]


def shipped_table(name: str) -> Path:
    """A published table that ships. Raises UsageProblem that names those there are."""
    from pytest_pdperf.errors import UsageProblem

    from .shipped import published_folder

    folder = published_folder()
    path = folder / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.json"))) or "none"
        raise UsageProblem(f"--published {name!r}: no such table (there is: {known})")
    return path
