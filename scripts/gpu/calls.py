"""Prints the commands that measure a workload on a machine that is lent for minutes at a time.

    python scripts/gpu/calls.py --topology aggregated-3x-tp2,pd-1p2d-tp2 --workload fixed-shapes-short --gpus 0-5 \
        --limit 600 --start-up 150

Cells take as long as the published table says for the same shape and kind of topology, else what `--plan` would guess.
Run the commands one after the other on the machine; each resumes the run of the one before, so `pdperf-results` has to
stay there or be brought back.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytest_pdperf.commands.report import shipped_table
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.report.published import read_published
from pytest_pdperf.spec.loader import find_topologies, find_workload, shipped_fixtures
from pytest_pdperf.spec.topology import Topology
from pytest_pdperf.spec.workload import Cell
from pytest_pdperf.stack.calls import Call, divide
from pytest_pdperf.stack.estimate import CELL_EXTRA_S, guess

SETTLE_S = 40.0
"""Kept free at the end of a call: an interrupted pytest takes everything down in this time (see suite.sh)."""


def seconds_of(topology: Topology, cell: Cell, published: dict[tuple[str, str], float]) -> float:
    """Seconds of a cell: its output tokens at the published rate, else a guess from its shape."""
    rate = published.get((topology.kind.value, cell.id))
    if rate is None or len(cell.streams) > 1:
        return CELL_EXTRA_S + guess(cell)
    return CELL_EXTRA_S + cell.main.requests * cell.main.output_tokens / rate


def command(call: Call, number: int, arguments: argparse.Namespace) -> str:
    """The shell command of a call; the model is left to the reader."""
    wanted = " or ".join(f"[{call.topology}-{cell}]" for cell in call.cells)
    resume = ' --resume "$(ls -t pdperf-results | head -n 1)"' if call.resumes else ""
    return (
        f"scripts/gpu/suite.sh MODEL out/{number} {arguments.limit - SETTLE_S:.0f} --gpus {arguments.gpus} "
        f"--topology {arguments.topology} --workload {arguments.workload} -k '{wanted}'{resume}"
    )


def rates(name: str) -> dict[tuple[str, str], float]:
    """(kind, cell id) -> published output tokens a second."""
    return {
        (cell.kind, cell.cell): cell.metrics["output_tps_wall"]
        for cell in read_published(shipped_table(name)).cells
        if "output_tps_wall" in cell.metrics
    }


def main(argv: list[str] | None = None) -> int:
    """Print the calls; 2 when a cell fits none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", required=True, help="comma-separated topologies")
    parser.add_argument("--workload", required=True)
    parser.add_argument("--gpus", default="0-5")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of one call (600)")
    parser.add_argument(
        "--start-up", type=float, default=150.0, help="seconds of a bring-up with its tear-down (150)"
    )
    parser.add_argument("--published", default="h100-qwen3-32b", help="table that tells how fast cells are")
    arguments = parser.parse_args(argv)
    folders = [Path("fixtures"), shipped_fixtures()]
    try:
        topologies = find_topologies(arguments.topology.split(","), folders)
        workload = find_workload(arguments.workload, folders)
        known = rates(arguments.published)
        calls = divide(
            {t.name: [(c.id, seconds_of(t, c, known)) for c in workload.cells] for t in topologies},
            start_up_s=arguments.start_up,
            limit_s=arguments.limit - SETTLE_S,
        )
    except UsageProblem as problem:
        print(f"calls: {problem}", file=sys.stderr)
        return 2
    for number, call in enumerate(calls, 1):
        print(f"# call {number}: {call.topology}, {len(call.cells)} cells, about {call.seconds:.0f} s")
        print(command(call, number, arguments))
    print(f"# {len(calls)} calls, about {sum(call.seconds for call in calls) / 60:.0f} min of machine time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
