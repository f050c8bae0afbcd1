"""`pdperf doctor`: is this node fit to measure on, and is anything left of dead runs?"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  pdperf doctor                         look, change nothing
  pdperf doctor --engine-env ~/vllm     look for engines in that environment
  pdperf doctor --clean                 end the processes that dead runs left behind
  pdperf doctor --json                  for scripts; exit status 1 when something fails
  pdperf doctor --inventory node.json   also record the GPUs, to plan for them elsewhere (--gpu-inventory)
"""


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="check this node, and clean up after dead runs",
        description="Checks GPUs, limits, clocks, ports and programs, and finds what dead runs left behind.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--engine-env", type=Path, metavar="DIR", help="virtual environment with engines and routers"
    )
    parser.add_argument("--results", type=Path, default=Path("pdperf-results"), help="where runs are stored")
    parser.add_argument(
        "--clean", action="store_true", help="end processes and cancel Slurm jobs of dead runs, and no others"
    )
    parser.add_argument(
        "--inventory", type=Path, metavar="FILE", help="write the GPUs and their links to this file as JSON"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check and show. Returns 1 when a check fails, else 0. Raises UsageProblem for a bad --engine-env."""
    from .checks import Level

    if arguments.inventory is not None:
        _record_inventory(arguments.inventory)
    findings = list(examine(arguments))
    if arguments.json:
        import orjson

        rows = [
            {"what": f.what, "level": f.level.value, "text": f.text, "way_out": f.way_out} for f in findings
        ]
        print(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
    else:
        _show(findings)
    return int(any(finding.level is Level.FAIL for finding in findings))


def _record_inventory(path: Path) -> None:
    """Write this node's GPUs. Raises UsageProblem when there are none or the file cannot be written."""
    from pytest_pdperf.errors import UsageProblem
    from pytest_pdperf.gpus.nvml import read_inventory

    inventory = read_inventory()
    if not inventory.gpus:
        raise UsageProblem(f"--inventory {path}: no GPU to record: {inventory.problem}")
    try:
        path.write_text(inventory.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise UsageProblem(f"--inventory {path}: cannot be written: {error.strerror or error}") from None


def examine(arguments: argparse.Namespace) -> Iterator[Any]:
    """All findings, in the order in which they are shown."""
    from pytest_pdperf.gpus.nvml import read_inventory
    from pytest_pdperf.stack.ports import is_bindable, port_window

    from . import checks

    yield from checks.check_gpus(read_inventory())
    yield from checks.check_programs(_programs(arguments.engine_env))
    yield checks.check_shm()
    yield from checks.check_limits()
    yield checks.check_ports(port_window(), is_bindable)
    yield checks.check_receive_stamps()
    optional = (checks.check_clock(), checks.check_governor(), checks.check_quota())
    yield from (finding for finding in optional if finding is not None)
    yield checks.check_load(os.getloadavg()[0], len(os.sched_getaffinity(0)))
    yield checks.check_rdma()
    yield checks.check_disk(arguments.results)
    yield _leftovers(clean_up=arguments.clean)
    yield from _left_jobs(clean_up=arguments.clean)


def _left_jobs(*, clean_up: bool) -> Iterator[Any]:
    """Jobs of dead runs, where there is a Slurm."""
    from pytest_pdperf.errors import UsageProblem
    from pytest_pdperf.stack.slurm.client import slurm
    from pytest_pdperf.stack.slurm.leftovers import cancel, left_jobs

    from . import checks

    if shutil.which("squeue") is None:
        return
    try:
        jobs = left_jobs(slurm)
    except UsageProblem as problem:
        yield checks.Finding("Slurm jobs", checks.Level.INFO, f"unknown: {problem}")
        return
    if clean_up:
        cancel(slurm, jobs)
    yield checks.check_left_jobs(jobs, cancelled=clean_up)


def _programs(engine_env: Path | None) -> Any:
    """Where programs are looked up, as a run would. Raises UsageProblem."""
    from pytest_pdperf.engines.base import Programs
    from pytest_pdperf.errors import UsageProblem

    search = []
    if engine_env is not None:
        if not (engine_env.expanduser() / "bin").is_dir():
            raise UsageProblem(
                f"--engine-env {engine_env}: no virtual environment there (its bin/ is missing)"
            )
        search.append(engine_env.expanduser().absolute() / "bin")
    search.append(Path(sys.executable).parent)
    search += [Path(part) for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if part]
    return Programs(tuple(dict.fromkeys(search)))


def _leftovers(*, clean_up: bool) -> Any:
    from pytest_pdperf.stack.leftovers import clean, find_leftovers

    from . import checks

    found = find_leftovers()
    if found and clean_up:
        alive = clean(found)
        if not alive:
            return checks.Finding(
                "leftovers", checks.Level.OK, f"{len(found)} processes of dead runs were ended"
            )
        found = alive
    return checks.check_leftovers([str(left) for left in found])


def _show(findings: list[Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from .output import console

    styles = {"ok": ("✓", "green"), "info": ("·", "dim"), "warn": ("!", "yellow"), "fail": ("✕", "bold red")}
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        sign, style = styles[finding.level.value]
        words = Text(finding.text)
        if finding.way_out and finding.level.value != "ok":
            words.append(f"\n→ {finding.way_out}", style="dim")
        table.add_row(Text(f"{sign} {finding.level.value}", style=style), Text(finding.what), words)
    console().print(table)
