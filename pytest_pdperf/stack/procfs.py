"""What /proc tells about processes, with the standard library only: the reaper runs without site-packages.

A process is always named by (pid, start time): a pid alone may belong to somebody else a moment later.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

RUN_ID = "PDPERF_RUN_ID"
"""Environment variable that marks every process of a run."""
PROCESS = "PDPERF_PROCESS"
"""Variable with a name that no other started process has: workers and topologies of one run repeat instance ids."""
INSTANCE = "PDPERF_INSTANCE"
"""Environment variable that names the instance within the run."""
OWNER = "PDPERF_OWNER"
"""Environment variable that names the process that started the run: `pid:start:pid space`."""


class Proc(NamedTuple):
    """A process that cannot be confused with a later one of the same pid."""

    pid: int
    start: int
    """Clock ticks since boot."""


class Stat(NamedTuple):
    """The fields of /proc/PID/stat that matter here."""

    proc: Proc
    ppid: int
    pgid: int
    sid: int
    """Session; the pid of the process that created it."""
    state: str


def read_stat(pid: int) -> Stat | None:
    """Parse /proc/PID/stat; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name is in parentheses and may contain both spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return Stat(Proc(pid, int(fields[19])), int(fields[1]), int(fields[2]), int(fields[3]), fields[0])


def all_stats() -> dict[int, Stat]:
    """Every process that can be seen, by pid."""
    found = (read_stat(int(p.name)) for p in Path("/proc").iterdir() if p.name.isdigit())
    return {stat.proc.pid: stat for stat in found if stat is not None}


def descendants(root: int, stats: dict[int, Stat] | None = None) -> list[Stat]:
    """All processes below `root`, zombies included, nearest first."""
    stats = all_stats() if stats is None else stats
    children: dict[int, list[Stat]] = {}
    for stat in stats.values():
        children.setdefault(stat.ppid, []).append(stat)
    out: list[Stat] = []
    queue = [root]
    for pid in queue:
        for stat in children.get(pid, ()):
            out.append(stat)
            queue.append(stat.proc.pid)
    return out


def environ(pid: int) -> dict[str, str]:
    """Environment a process was started with; empty when it may not be read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, _, v in pairs}


def marked(run_id: str, process: str | None = None) -> list[Stat]:
    """Living processes that carry this run's marker (and that of one started process, when given)."""
    me = os.getpid()
    out = []
    for stat in all_stats().values():
        if stat.proc.pid == me or stat.state in "ZX":
            continue
        env = environ(stat.proc.pid)
        if env.get(RUN_ID) == run_id and (process is None or env.get(PROCESS) == process):
            out.append(stat)
    return out


def session_of(leader: Proc) -> list[Stat]:
    """Living processes of the session that `leader` created, whether or not it still lives itself.

    The kernel gives no new process the number of a session that has members, so the number is safe to trust unless
    another process leads it.
    """
    stats = all_stats()
    now = stats.get(leader.pid)
    if now is not None and now.proc != leader:
        return []
    return [s for s in stats.values() if s.sid == leader.pid and s.state not in "ZX"]


def is_alive(proc: Proc) -> bool:
    """True while exactly this process runs; a zombie does not."""
    stat = read_stat(proc.pid)
    return stat is not None and stat.proc == proc and stat.state not in "ZX"


def send(proc: Proc, signum: signal.Signals) -> bool:
    """Signal exactly this process; False when it is gone or not ours.

    The pidfd is opened first and the start time compared afterwards, so a recycled pid cannot be hit.
    """
    try:
        fd = os.pidfd_open(proc.pid)
    except ProcessLookupError:
        return False
    except OSError:
        # No pidfd (old kernel): compare, then signal; the gap is microseconds.
        if not is_alive(proc):
            return False
        try:
            os.kill(proc.pid, signum)
        except (ProcessLookupError, PermissionError):
            return False
        return True
    try:
        if not is_alive(proc):
            return False
        signal.pidfd_send_signal(fd, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(fd)
    return True


def send_all(procs: Iterable[Proc], signum: signal.Signals) -> int:
    """Signal each of these processes; the number that took it."""
    return sum(send(proc, signum) for proc in procs)


def pid_space(proc: Path = Path("/proc")) -> str:
    """Identity of the machine's boot and of this process's pid namespace; pids mean nothing outside of both.

    The first namespace has the same number on every Linux machine, so the boot must tell machines apart.
    """
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(proc / 'self/ns/pid').readlink()}".replace(":", "")
    except OSError:
        return "?"


def owner_marker() -> str:
    """Value of the OWNER variable for processes that this process starts."""
    stat = read_stat(os.getpid())
    return f"{os.getpid()}:{stat.proc.start if stat else 0}:{pid_space()}"


def owner_alive(marker: str) -> bool | None:
    """Whether the process that started a run still lives; None when that cannot be told from here."""
    parts = marker.split(":")
    if len(parts) != 3 or parts[2] != pid_space():
        return None
    try:
        return is_alive(Proc(int(parts[0]), int(parts[1])))
    except ValueError:
        return None


def oom_kills() -> dict[str, int]:
    """Counters of kernel OOM kills: `cgroup` (ours and below) and `system`; a missing key is unknown."""
    out: dict[str, int] = {}
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            file = Path("/sys/fs/cgroup", path.lstrip("/"), "memory.events")
        elif "memory" in controllers.split(","):
            file = Path("/sys/fs/cgroup/memory", path.lstrip("/"), "memory.oom_control")
        else:
            continue
        _count(out, "cgroup", file)
    _count(out, "system", Path("/proc/vmstat"))
    return out


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _count(out: dict[str, int], name: str, file: Path) -> None:
    for line in _lines(file):
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.strip().isdigit():
            out[name] = int(value)
