"""Finds what dead runs left behind, by their marker only, and ends it when asked (`pdperf doctor`)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from pytest_pdperf.stack import procfs
from pytest_pdperf.stack.secrets import mask


@dataclass(frozen=True, slots=True)
class Leftover:
    """A living process of a run whose pytest is dead."""

    proc: procfs.Proc
    run_id: str
    instance: str
    command: str
    """Command line, secrets masked."""
    age_s: float

    def __str__(self) -> str:
        what = f"{self.instance} of run {self.run_id}, {self.age_s:.0f} s old"
        return f"pid {self.proc.pid}: {what}: {self.command[:160]}"


def find_leftovers(run_id: str | None = None) -> list[Leftover]:
    """Processes that carry a run's marker while the process that started the run is gone.

    Processes of living runs are never listed, nor those whose owner cannot be judged from here (another pid
    namespace). Only processes whose environment this user may read can be found. `run_id` restricts the
    search.
    """
    dead: dict[procfs.Stat, tuple[str, str]] = {}
    stats = {s for s in procfs.all_stats().values() if s.state not in "ZX" and s.proc.pid != os.getpid()}
    for stat in stats:
        env = procfs.environ(stat.proc.pid)
        run = env.get(procfs.RUN_ID)
        if run is None or (run_id is not None and run != run_id):
            continue
        if procfs.owner_alive(env.get(procfs.OWNER, "")) is False:
            dead[stat] = (run, env.get(procfs.INSTANCE, "?"))
    # A process may have lost its environment; the session that a marked process leads is ours all the same.
    leaders = {stat.sid: name for stat, name in dead.items() if stat.sid == stat.proc.pid}
    for stat in stats - set(dead):
        if stat.sid in leaders:
            dead[stat] = leaders[stat.sid]
    found = [_describe(stat.proc, *name) for stat, name in dead.items()]
    return sorted((f for f in found if f is not None), key=lambda left: (left.run_id, left.proc.pid))


def clean(
    leftovers: Sequence[Leftover],
    *,
    grace_s: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Leftover]:
    """SIGTERM, then SIGKILL after `grace_s`; returns what is still alive 3 s later, normally nothing.

    A pid that belongs to another process by now is left alone.
    """
    procs = [left.proc for left in leftovers]
    for signum, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 3.0)):
        alive = [p for p in procs if procfs.is_alive(p)]
        procfs.send_all(alive, signum)
        until = clock() + patience
        while alive and clock() < until:
            sleep(0.05)
            alive = [p for p in alive if procfs.is_alive(p)]
    return [left for left in leftovers if procfs.is_alive(left.proc)]


def _describe(proc: procfs.Proc, run_id: str, instance: str) -> Leftover | None:
    try:
        process = psutil.Process(proc.pid)
        with process.oneshot():
            command = " ".join(process.cmdline()) or process.name()
            age = time.time() - process.create_time()
    except psutil.NoSuchProcess:
        return None
    except psutil.Error:
        return Leftover(proc, run_id, instance, "command unknown", 0.0)
    return Leftover(proc, run_id, instance, mask(command), age)
