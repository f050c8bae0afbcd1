"""Processes are told apart by pid and start time, whatever they are called."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from pytest_pdperf.stack import procfs


def test_a_name_with_spaces_and_parentheses_is_read_right() -> None:
    """comm may hold anything: `VLLM::EngineCor`, `a) R 1 (b`."""
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'a) R 1 (b', 0, 0, 0);"
    code += "print('on', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        stat = procfs.read_stat(process.pid)
        assert stat is not None
        assert (stat.ppid, stat.state in "SR") == (os.getpid(), True)
        assert stat.proc in [s.proc for s in procfs.descendants(os.getpid())]
        wrong = procfs.Proc(process.pid, stat.proc.start + 1)
        assert not procfs.is_alive(wrong)
        assert not procfs.send(wrong, signal.SIGKILL)
        time.sleep(0.1)
        assert process.poll() is None, "a wrong start time protects a recycled pid"
        assert procfs.send(stat.proc, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not procfs.is_alive(stat.proc), "a zombie is not alive"
        process.wait()
        assert procfs.read_stat(process.pid) is None
        assert not procfs.send(stat.proc, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_descendants_are_found_through_generations() -> None:
    def stat(pid: int, ppid: int) -> procfs.Stat:
        return procfs.Stat(procfs.Proc(pid, 1), ppid, pid, pid, "S")

    table = {s.proc.pid: s for s in (stat(2, 1), stat(3, 2), stat(4, 3), stat(5, 1), stat(6, 9), stat(7, 2))}
    assert [s.proc.pid for s in procfs.descendants(2, table)] == [3, 7, 4]
    assert procfs.descendants(4, table) == []


def test_a_session_is_told_by_its_number_and_a_recycled_leader_is_not_trusted() -> None:
    shell = subprocess.Popen(
        ["/bin/sh", "-c", "sleep 600 & echo on; wait"], start_new_session=True, stdout=subprocess.PIPE
    )
    try:
        assert shell.stdout is not None
        shell.stdout.readline()
        stat = procfs.read_stat(shell.pid)
        assert stat is not None
        assert stat.sid == shell.pid
        assert len(procfs.session_of(stat.proc)) == 2
        assert procfs.session_of(procfs.Proc(shell.pid, stat.proc.start - 1)) == []
        shell.kill()
        shell.wait()
        left = procfs.session_of(stat.proc)
        assert len(left) == 1, "the leader is dead, its session is not"
        procfs.send(left[0].proc, signal.SIGKILL)
    finally:
        shell.kill()
        shell.wait()
        assert shell.stdout is not None
        shell.stdout.close()


def test_owners_are_judged_only_from_their_own_namespace() -> None:
    assert procfs.owner_alive(procfs.owner_marker()) is True
    pid, start, namespace = procfs.owner_marker().split(":")
    assert procfs.owner_alive(f"{pid}:{int(start) + 1}:{namespace}") is False
    assert procfs.owner_alive(f"{pid}:{start}:1") is None
    for nonsense in ("", "x", "1:2", f"a:b:{namespace}"):
        assert procfs.owner_alive(nonsense) is None


def test_oom_counters_are_read_where_they_exist() -> None:
    counts = procfs.oom_kills()
    assert set(counts) <= {"cgroup", "system"}
    assert all(value >= 0 for value in counts.values())
