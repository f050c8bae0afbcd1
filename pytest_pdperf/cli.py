"""`pdperf`: everything around a run that is not a test."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .commands import completion, doctor, export, history, import_, init, manifests, report
from .errors import UsageProblem

EXAMPLES = """\
examples:
  pdperf doctor                            is this node fit to measure on?
  pdperf init                              put the suite into this repository
  pdperf report                            the newest run as a table
  pdperf report OLD NEW --html diff.html   two runs as one page
  pdperf history --cell 'in512-*'          how cells went over the nights
  pdperf import vllm.json --beside RUN     another tool's result beside a run
  pdperf export RUN --as raw -o run.parquet  every event, or another tool's format
  pdperf manifests pd-1p2d --model M --image IMAGE    a topology for a Kubernetes cluster

Runs themselves are pytest's business: pytest -m pd --gpus 0-7
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands; heavy rooms are imported by a subcommand when it runs."""
    parser = argparse.ArgumentParser(
        prog="pdperf",
        description="Around pytest-pdperf runs: reports, history, set-up, checks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pdperf {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (report, history, import_, export, init, manifests, doctor, completion):
        command.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns 0, 1 when what is shown is bad news, 2 for bad input."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except UsageProblem as problem:
        print(f"pdperf: {problem}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
