"""The load generator's own process: `python -m pytest_pdperf.load.worker JOB OUT [NUMBER]`.

Apart from pytest, so that no collector, report or garbage collection of the parent delays a send or a read.
Progress goes to stdout, one JSON a line; the result is left in OUT. Exit status 0, 2 for bad input. Where several
drive one job, NUMBER says which part is whose, and each waits, warm, for a line on stdin: the ns at which the clock
starts. SIGTERM ends a run early: what was measured by then is stored, and the exit status is 3.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from threading import Event

import orjson
import uvloop

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.gpus.cores import core_list
from pytest_pdperf.measure.records import RequestRecord

from .bodies import headers_of
from .decode import Expect, to_record
from .drive import Drive, Go, Outcome
from .job import PARENT, Job
from .progress import Progress
from .results import write_records
from .run_signs import nagle_warning, settle_chat
from .spool import Spool

CLOCK_STEP_NS = 1_000_000
"""Both clocks drift alike: what moves one of them further than this was set."""
STOPPED = 3
"""Exit status of a worker that was told to end early."""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit at once if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def run_job(
    job: Job,
    out: Path,
    *,
    environ: dict[str, str],
    progress: int | None = None,
    number: int = 0,
    warnings: tuple[str, ...] = (),
    stop_asked: Callable[[], bool] = bool,
) -> None:
    """Drive a job, or this process's share of it, and leave its records in `out`.

    `progress` is a file descriptor for JSON lines; `warnings` are stored with the records; once `stop_asked` says so
    the run ends early.
    """
    headers = headers_of(job.target, environ)
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()

    def tell(state: Progress) -> None:
        if progress is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(progress, orjson.dumps(asdict(state)) + b"\n")

    with Spool(out / "bodies.spool") as spool:
        drive = Drive(
            loop,
            job,
            spool,
            headers=headers,
            on_progress=tell,
            share=job.share(number),
            hold=partial(wait_for_start, loop, 0) if job.processes > 1 else None,
            stop_asked=stop_asked,
        )
        before = clock_offset_ns()
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            outcome = drive.run()
        finally:
            gc.enable()
            gc.unfreeze()
            loop.close()
        outcome.warnings += warnings
        moved = clock_offset_ns() - before
        outcome.clock_step_ns = moved if abs(moved) > CLOCK_STEP_NS else 0
        tell(Progress("decode", job.total, job.total, 0, 0, 0.0))
        _store(job, outcome, spool, out)


def clock_offset_ns(
    clock: Callable[[], int] = time.time_ns, steady: Callable[[], int] = time.monotonic_ns
) -> int:
    """System clock - monotonic clock, in ns, from the closest of several pairs: a reader may lose its CPU between two
    readings.
    """
    readings = []
    for _ in range(9):
        before, now, after = steady(), clock(), steady()
        readings.append((after - before, now - before))
    return min(readings)[1]


def wait_for_start(loop: asyncio.AbstractEventLoop, fd: int, go: Go) -> None:
    """Pass on the moment that the parent writes as one line when every process is ready."""
    line = b""

    def read() -> None:
        nonlocal line
        line += os.read(fd, 64)
        if line.endswith(b"\n") or not line:
            loop.remove_reader(fd)
        if line.endswith(b"\n"):
            go(int(line))

    loop.add_reader(fd, read)


def _store(job: Job, outcome: Outcome, spool: Spool, out: Path) -> None:
    chat = job.target.api == "chat"
    expect = Expect(check_prompt=not chat)

    def records() -> Iterator[RequestRecord]:
        for exchange in outcome.exchanges:
            record = to_record(exchange, spool.get(exchange), job.target.api, expect)
            yield replace(record, error=job.target.access.masked(record.error)) if record.error else record

    made = settle_chat(list(records())) if chat else records()
    unstamped = sum(e.user_stamps for e in outcome.exchanges if not e.warmup)
    kernel = not job.target.tls and unstamped == 0
    warnings = [*outcome.warnings, *nagle_warning(outcome.exchanges, job.target.quick_ack)]
    if job.target.tls:
        warnings.append(
            "TLS: receive times are user-space stamps, the kernel's cannot be matched to plaintext"
        )
    elif unstamped:
        warnings.append(
            f"{unstamped} requests have reads without a kernel stamp; treated as user-space stamps"
        )
    if spool.problem:
        warnings.append(spool.problem)
    write_records(
        out,
        made,
        {
            "stamp_source": "kernel" if kernel else "user",
            "started_ns": outcome.started_ns,
            "ended_ns": outcome.ended_ns,
            "max_in_flight": outcome.max_in_flight,
            "reached_concurrency": outcome.reached,
            "client_cpu_s": outcome.cpu_s,
            "clock_step_ms": outcome.clock_step_ns / 1e6,
            "warnings": warnings,
            "client_processes": job.processes,
            "client_cores": core_list(job.cpus),
            "merged_segments": sum(e.merged for e in outcome.exchanges if not e.warmup),
        },
    )


def pin(
    cpus: tuple[int, ...], set_affinity: Callable[[int, tuple[int, ...]], None] = os.sched_setaffinity
) -> tuple[str, ...]:
    """Stay on these cores; none leaves it to the kernel. Returns a warning where that is refused."""
    if cpus:
        try:
            set_affinity(0, cpus)
        except OSError as problem:
            return (f"the client could not be kept to its cores {core_list(cpus)}: {problem.strerror}",)
    return ()


def ask_for_cpu_first() -> None:
    """Be scheduled before the engines where cores are shared; without the right to ask, go on as before.

    A session is an autogroup of its own, whose nice value decides between sessions (sched(7)).
    """
    with contextlib.suppress(OSError):
        os.nice(-10)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-10")


def main(argv: list[str]) -> int:
    """Entry point of the process."""
    if len(argv) not in (2, 3):
        print("usage: python -m pytest_pdperf.load.worker JOB OUT [NUMBER]", file=sys.stderr)
        return 2
    parent = os.environ.get(PARENT)
    if parent:
        die_with_parent(int(parent))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.set_blocking(1, False)  # a parent that does not read must not hold the clock
    stopped = Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    try:
        job = Job.read(Path(argv[0]))
        ask_for_cpu_first()
        number = int(argv[2]) if len(argv) > 2 else 0
        unpinned = pin(job.cpus)
        run_job(
            replace(job, cpus=()) if unpinned else job,
            Path(argv[1]),
            environ=dict(os.environ),
            progress=1,
            number=number,
            warnings=unpinned,
            stop_asked=stopped.is_set,
        )
    except UsageProblem as problem:
        print(problem, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all is stored: the exit status must say how it went
    if stopped.is_set():
        print("stopped early; what was measured by then is stored", file=sys.stderr)
        return STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
