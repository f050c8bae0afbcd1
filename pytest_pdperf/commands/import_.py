"""`pdperf import`: show what another benchmark tool measured, beside a run of ours where both mean the same."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  pdperf import vllm-result.json
  pdperf import result.jsonl --as sglang
  pdperf import vllm-result.json --beside pdperf-results/20260101-000000-abcd
  pdperf import profile_export.jsonl --beside RUN --cell in512-out256-c4
"""


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "import",
        help="show another tool's result, beside a run",
        description="Reads results of vllm bench serve, sglang.bench_serving, aiperf and guidellm, and Mooncake "
        "traces, and our own raw files. Nothing of it enters a baseline.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="result file of another tool")
    parser.add_argument(
        "--as", dest="as_", metavar="FORMAT", help="its format (told from what is in the file)"
    )
    parser.add_argument("--beside", type=Path, metavar="RUN", help="run folder whose cells stand beside it")
    parser.add_argument(
        "--cell", metavar="CELL", help="cell of the run (that of the same shape and concurrency)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was read as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the results. Returns 0. Raises UsageProblem for what cannot be read or compared."""
    from pytest_pdperf.errors import UsageProblem
    from pytest_pdperf.report.exchange.beside import matching
    from pytest_pdperf.report.exchange.detect import import_file
    from pytest_pdperf.report.source import folder_of, open_source

    from .output import console

    if arguments.cell and not arguments.beside:
        raise UsageProblem("--cell: names a cell of a run; give the run with --beside RUN")
    results = import_file(arguments.file, arguments.as_)
    source = open_source(folder_of(arguments.beside)) if arguments.beside else None
    if arguments.json:
        _write(arguments.json, results)
    out = console()
    for result in results:
        outcomes = matching(result, source.outcomes, arguments.cell) if source else []
        _show(out, result, outcomes)
    return 0


def _write(path: Path, results: Any) -> None:
    """All results as one JSON list. Raises UsageProblem where it cannot be written."""
    import orjson

    from pytest_pdperf.errors import UsageProblem

    try:
        path.write_bytes(orjson.dumps([one.to_json() for one in results], option=orjson.OPT_INDENT_2))
    except OSError as problem:
        raise UsageProblem(f"--json {path}: cannot be written: {problem.strerror or problem}") from None


def _show(out: Any, result: Any, outcomes: Any) -> None:
    """Head, table and warnings of one result."""
    from rich.table import Table
    from rich.text import Text

    from pytest_pdperf.gate.verdict import number
    from pytest_pdperf.report.exchange.beside import rows, same_load

    out.print(Text(result.source, style="bold"))
    for line in _head(result):
        out.print(Text(line))
    table = Table(box=None, pad_edge=False)
    table.add_column("metric", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column(result.tool, justify="right", no_wrap=True)
    for outcome in outcomes:
        invalid = " INVALID" if outcome.result.invalid else ""
        table.add_column(f"{outcome.topology}\n{outcome.result.cell}{invalid}", justify="right")
        table.add_column(f"{result.tool}\nvs ours", justify="right", no_wrap=True)
    table.add_column("n", justify="right")
    table.add_column("definition, note", overflow="fold")
    for row in rows(result, outcomes):
        shown = number(row.theirs.value) if row.theirs.value is not None else "?"
        cells = []
        for ours in row.ours:
            cells.append(number(ours.value) if ours.value is not None else "-")
            cells.append(f"{ours.change:+.1%}" if ours.change is not None else "-")
        note = row.theirs.definition + (f" ({row.theirs.note})" if row.theirs.note else "")
        n = str(row.theirs.n) if row.theirs.n is not None else "?"
        table.add_row(*(Text(text) for text in (row.metric, row.theirs.unit, shown, *cells, n, note)))
    out.print(table)
    if any(not row.same for row in rows(result)):
        out.print(
            Text(f"{result.tool}:... is defined otherwise than ours, or we have no such metric: not compared")
        )
    for outcome in outcomes:
        if not same_load(result, outcome):
            text = f"{outcome.result.cell} is another load than {result.shape} at concurrency {result.concurrency}"
            print(f"pdperf: warning: {text}: the differences are not those of the systems", file=sys.stderr)
    for warning in result.warnings:
        print(f"pdperf: warning: {result.source}: {warning}", file=sys.stderr)


def _head(result: Any) -> list[str]:
    """What was read, with a ? for all that the file does not say."""

    def known(value: object) -> str:
        return "?" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    failed = known(result.failed) + (f" ({result.failed_source})" if result.failed_source else "")
    return [
        f"{result.tool} {result.version}, layout {result.layout}, backend {result.backend}, model {result.model}",
        f"shape {result.shape}, concurrency {known(result.concurrency)}, request rate {result.request_rate}, "
        f"duration {known(result.duration_s)} s",
        f"requests {known(result.requests)}, ok {known(result.ok)}, failed {failed}, "
        f"cancelled {known(result.cancelled)}, warm-up rows {known(result.warmup_rows)}",
    ]
