"""Run a cell in processes of its own and bring its records back, or stop at once when the stack under it dies."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pytest_pdperf.measure.records import CellRecords
from pytest_pdperf.spec.workload import Cell

from .bodies import headers_of
from .crew import LoadError, Worker, watch
from .job import Job
from .merge import merge
from .plan import plan_cell
from .planned import StreamPlan
from .progress import Progress
from .results import read_records, store_records
from .run_signs import settle_chat
from .shares import Tickets
from .target import Target

__all__ = ["LoadError", "deadline_s", "run_cell"]

SLACK_S = 60.0
"""Time beyond the requests' own deadlines: start of the process, connecting, decoding."""
RESULT = ("records.json", "stamps.bin")


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
    processes: int = 1,
) -> CellRecords:
    """One measured pass of a cell: warm-ups, then every request of every stream, one record each.

    `salt` names the run, never the topology. `check` is called about ten times a second; what it raises (a
    role died) ends the workers at once and passes on. `cpus` are the cores of the client, empty for any. Several
    `processes` share the cell's clients and schedules, start their clocks together and leave one merged record; there
    must be no more of them than clients and open-loop requests. Raises UsageProblem before anything is sent (context
    overflow, unset header variable, bad trace) and LoadError when a worker dies or outlives the deadline
    of the whole.
    """
    headers_of(target, os.environ)
    plans = plan_cell(cell, target, seed=seed, salt=salt)
    job = Job(target, plans, cell.timeout_s, f"pdperf-{uuid.uuid4().hex[:12]}", cpus, processes)
    out_dir.mkdir(parents=True, exist_ok=True)
    for stale in RESULT:
        (out_dir / stale).unlink(missing_ok=True)
    with _piles(plans if processes > 1 else (), out_dir) as tickets:
        job = replace(job, tickets=tickets)
        job_file = out_dir / "job.json"
        job.write(job_file)
        workers: list[Worker] = []
        try:
            for number in range(processes):
                folder = out_dir if processes == 1 else out_dir / f"process-{number + 1}"
                name = "load worker" if processes == 1 else f"load worker {number + 1} of {processes}"
                workers.append(Worker(job_file, folder, name, number, tuple(tickets.values())))
            culprit = watch(workers, deadline_s(plans, cell.timeout_s), on_progress, check)
        finally:
            for worker in workers:
                worker.kill()
    if culprit is not None:
        culprit.refuse()
        raise LoadError(culprit.reason() + _kept(workers, culprit))
    try:
        if processes == 1:
            return read_records(out_dir)
        return _merged(workers, job, out_dir)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise LoadError(f"load worker left no whole result in {out_dir}: {problem}") from problem


def _merged(workers: Sequence[Worker], job: Job, out_dir: Path) -> CellRecords:
    """One result of all parts, stored in their place."""
    records = merge([read_records(worker.folder) for worker in workers], job.streams)
    if job.target.api == "chat":
        records = replace(records, requests=tuple(settle_chat(records.requests)))
    store_records(out_dir, records)
    for worker in workers:
        for name in RESULT:
            (worker.folder / name).unlink()
    return records


def _kept(workers: Sequence[Worker], culprit: Worker) -> str:
    """Where the other workers' measurements lie, once they were stopped."""
    found = []
    for worker in workers:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if worker is not culprit:
                measured = sum(not r.warmup for r in read_records(worker.folder).requests)
                found.append(f"{measured} requests in {worker.folder}")
    return f"; what the others had measured is kept: {', '.join(found)}" if found else ""


@contextlib.contextmanager
def _piles(plans: Sequence[StreamPlan], folder: Path) -> Iterator[Mapping[str, int]]:
    """A pile of tickets for every closed-loop stream."""
    fds: dict[str, int] = {}
    try:
        for plan in plans:
            if plan.concurrency is not None:
                fds[plan.name] = Tickets.open(folder / "tickets", len(plan.requests))
        yield fds
    finally:
        for fd in fds.values():
            os.close(fd)


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
