"""`pdperf export`: a run in the files of other tools, or every single event of it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

FORMATS = ("vllm", "pytest-benchmark", "pytorch-hud", "llm-d", "raw")
EXAMPLES = """\
examples:
  pdperf export RUN --as vllm --cell in512-out256-c4 -o result.json
  pdperf export RUN --as pytest-benchmark -o run.json
  pdperf export RUN --as pytorch-hud -o benchmark-results.json
  pdperf export RUN --as llm-d --topology pd-1p2d --cell in512-out256-c4 -o report.json
  pdperf export RUN --as raw -o events.parquet

`pytest-benchmark compare run.json` shows the second.
Several cells as vllm are JSON lines, as `vllm bench serve --append-result` writes them; several as llm-d too, since
a Benchmark Report is about one. pytorch-hud is the list of records that PyTorch's benchmark database takes.
"""


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "export",
        help="write a run in another tool's format",
        description="Writes a run as vLLM benchmark results, pytest-benchmark JSON, records of PyTorch's "
        "benchmark database, llm-d Benchmark Reports, or raw events (Parquet).",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--as", dest="as_", required=True, choices=FORMATS, help="format")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write (standard output)")
    parser.add_argument("--topology", default="*", metavar="PATTERN", help="topologies, shell-style")
    parser.add_argument("--cell", default="*", metavar="PATTERN", help="cells, shell-style")
    parser.add_argument(
        "--detailed", action="store_true", help="vllm: also the lists of single requests (--save-detailed)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the file. Returns 0, or 1 when cells had to be left out. Raises UsageProblem."""
    from pytest_pdperf.errors import UsageProblem
    from pytest_pdperf.report.exchange.chosen import choose
    from pytest_pdperf.report.source import folder_of, open_source

    if arguments.detailed and arguments.as_ != "vllm":
        raise UsageProblem(
            f"--detailed: only --as vllm has such lists; {arguments.as_} has every request anyway"
        )
    if arguments.as_ == "raw":
        _ready_for_raw(arguments.output)
    source = open_source(folder_of(arguments.run_folder))
    for problem in source.problems:
        print(f"pdperf: warning: {source.name}: {problem}", file=sys.stderr)
    cells = choose(source, arguments.topology, arguments.cell)
    if arguments.as_ == "raw":
        left_out = _raw(source, cells, arguments.output)
    elif arguments.as_ == "pytorch-hud":
        left_out = _pytorch_hud(source, cells, arguments.output)
    elif arguments.as_ == "llm-d":
        left_out = _llm_d(cells, arguments.output)
    elif arguments.as_ == "vllm":
        left_out = _vllm(cells, arguments.output, arguments.detailed)
    else:
        left_out = _pytest_benchmark(source, cells, arguments.output)
    for line in left_out:
        print(f"pdperf: warning: {line}", file=sys.stderr)
    return int(bool(left_out))


def _ready_for_raw(output: Path | None) -> None:
    """Raises UsageProblem for what a raw file lacks, before a run of any size is read."""
    from pytest_pdperf.errors import UsageProblem
    from pytest_pdperf.report.exchange.raw import arrow

    if output is None:
        raise UsageProblem("--as raw: is binary; name a file with -o, events.parquet for example")
    arrow()


def _raw(source: Any, cells: Any, output: Path) -> list[str]:
    from pytest_pdperf.report.exchange.raw import write_raw

    left_out = write_raw(source, cells, output)
    print(f"wrote {output}")
    return left_out


def _vllm(cells: Any, output: Path | None, detailed: bool) -> list[str]:
    import orjson

    from pytest_pdperf.errors import UsageProblem
    from pytest_pdperf.report.exchange.to_vllm import vllm_results

    found: list[bytes] = []
    for chosen in cells:
        if chosen.records is None and detailed:
            raise UsageProblem(f"--detailed: {chosen.name}: {chosen.missing}")
        if chosen.outcome.result.invalid:
            reason = chosen.outcome.result.invalid[0]
            print(f"pdperf: warning: {chosen.name} is INVALID ({reason}); its file says so", file=sys.stderr)
        found += [orjson.dumps(result) for result in vllm_results(chosen, detailed=detailed)]
    _put(b"\n".join(found) + b"\n", output)
    return []


def _pytorch_hud(source: Any, cells: Any, output: Path | None) -> list[str]:
    import orjson

    from pytest_pdperf.errors import UsageProblem
    from pytest_pdperf.report.exchange.to_pytorch_hud import pytorch_hud_records

    records, left_out = pytorch_hud_records(cells)
    if not records:
        raise UsageProblem(f"{source.name}: nothing to export as pytorch-hud: {'; '.join(left_out)}")
    _put(orjson.dumps(records, option=orjson.OPT_INDENT_2) + b"\n", output)
    return left_out


def _llm_d(cells: Any, output: Path | None) -> list[str]:
    import orjson

    from pytest_pdperf.report.exchange.to_llm_d import llm_d_reports

    reports = [report for chosen in cells for report in llm_d_reports(chosen)]
    _put(b"\n".join(orjson.dumps(report) for report in reports) + b"\n", output)
    return []


def _pytest_benchmark(source: Any, cells: Any, output: Path | None) -> list[str]:
    import orjson

    from pytest_pdperf.errors import UsageProblem
    from pytest_pdperf.report.exchange.to_pytest_benchmark import pytest_benchmark_json

    document, left_out = pytest_benchmark_json(source, cells)
    if not document["benchmarks"]:
        reasons = "; ".join(left_out) or "no request succeeded"
        raise UsageProblem(f"{source.name}: nothing to export as pytest-benchmark: {reasons}")
    _put(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n", output)
    return left_out


def _put(data: bytes, output: Path | None) -> None:
    """To a file, or to standard output. Raises UsageProblem where it cannot be written."""
    from pytest_pdperf.errors import UsageProblem

    if output is None:
        sys.stdout.write(data.decode())
        return
    try:
        output.write_bytes(data)
    except OSError as problem:
        raise UsageProblem(f"-o {output}: cannot be written: {problem.strerror or problem}") from None
    print(f"wrote {output}")
