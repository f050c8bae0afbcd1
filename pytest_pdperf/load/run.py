"""Run a cell in its own process and bring its records back, or stop at once when the stack under it dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import orjson

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.measure.records import CellRecords
from pytest_pdperf.spec.workload import Cell

from .bodies import headers_of
from .job import PARENT, Job
from .plan import plan_cell
from .planned import StreamPlan
from .progress import Progress
from .results import read_records
from .target import Target

POLL_S = 0.1
SLACK_S = 60.0
"""Time beyond the requests' own deadlines: start of the process, connecting, decoding."""


class LoadError(Exception):
    """The load generator itself failed - not the server: no records, and nothing to compare."""


def run_cell(
    target: Target,
    cell: Cell,
    *,
    seed: int,
    salt: str,
    out_dir: Path,
    on_progress: Callable[[Progress], None] | None = None,
    check: Callable[[], None] | None = None,
    cpus: tuple[int, ...] = (),
) -> CellRecords:
    """One measured pass of a cell: warm-ups, then every request of every stream, one record each.

    `salt` names the run, never the topology. `check` is called about ten times a second; what it raises (a
    role died) ends the worker at once and passes on. Raises UsageProblem before anything is sent (context
    overflow, unset header variable, bad trace) and LoadError when the worker dies or outlives the deadline
    of the whole.
    """
    headers_of(target, os.environ)
    plans = plan_cell(cell, target, seed=seed, salt=salt)
    job = Job(target, plans, cell.timeout_s, f"pdperf-{uuid.uuid4().hex[:12]}", cpus)
    out_dir.mkdir(parents=True, exist_ok=True)
    job_file = out_dir / "job.json"
    job.write(job_file)
    for stale in ("records.json", "stamps.bin"):
        (out_dir / stale).unlink(missing_ok=True)
    errors = out_dir / "worker.log"
    with errors.open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "pytest_pdperf.load.worker", str(job_file), str(out_dir)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env={**os.environ, PARENT: str(os.getpid()), "PYTHONPATH": _import_path()},
        )
    try:
        _watch(worker, deadline_s(plans, cell.timeout_s), on_progress, check)
    finally:
        _stop(worker)
    if worker.returncode == 2:
        raise UsageProblem(_last_line(errors))
    if worker.returncode != 0:
        raise LoadError(f"load worker ended with {_exit_text(worker.returncode)}: {_last_line(errors)}")
    try:
        return read_records(out_dir)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise LoadError(f"load worker left no whole result in {out_dir}: {problem}") from problem


def deadline_s(plans: tuple[StreamPlan, ...], timeout_s: float) -> float:
    """Longest time that a run may take: every request at its own deadline, clients in parallel.

    A worker gives up by itself much earlier when a server only times out, so this bound is for a worker that
    hangs.
    """
    longest = 0.0
    for plan in plans:
        count = len(plan.requests)
        if plan.concurrency is None:
            span = max((r.at_s or 0.0) for r in plan.requests) + timeout_s
        else:
            span = -(-count // plan.concurrency) * (timeout_s + plan.think_s)
        warm = -(-len(plan.warmups) // (plan.concurrency or 4)) * timeout_s
        longest = max(longest, warm + span)
    return longest + SLACK_S


def _watch(
    worker: subprocess.Popen[bytes],
    deadline: float,
    on_progress: Callable[[Progress], None] | None,
    check: Callable[[], None] | None,
) -> None:
    assert worker.stdout is not None
    os.set_blocking(worker.stdout.fileno(), False)
    end = time.monotonic() + deadline
    pending = b""
    while True:
        over = worker.poll() is not None
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(worker.stdout.fileno(), 65536):
                pending += chunk
        *lines, pending = pending.split(b"\n")
        if on_progress is not None and lines:
            on_progress(Progress.from_json(orjson.loads(lines[-1])))
        if over:
            return
        if check is not None:
            check()
        if time.monotonic() > end:
            raise LoadError(f"load worker did not end within {deadline:.0f} s and was killed")
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(POLL_S)


def _stop(worker: subprocess.Popen[bytes]) -> None:
    """Kill the worker's process group if it still runs, and reap it."""
    if worker.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    if worker.stdout is not None:
        worker.stdout.close()


def _import_path() -> str:
    """PYTHONPATH that finds this very package, installed or not."""
    root = str(Path(__file__).resolve().parents[2])
    rest = os.environ.get("PYTHONPATH", "")
    return f"{root}{os.pathsep}{rest}" if rest else root


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def _exit_text(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
