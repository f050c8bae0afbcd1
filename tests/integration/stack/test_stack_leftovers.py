"""What a dead run left is found by its marker alone, and nothing else is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_pdperf.stack import procfs
from pytest_pdperf.stack.leftovers import Leftover, clean, find_leftovers

Sleeper = Callable[..., subprocess.Popen[bytes]]
_SLEEP = "print('on', flush=True); import time; time.sleep(600)"
_STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {_SLEEP}"


@pytest.fixture
def run_id(tmp_path: Path) -> str:
    return f"left-{tmp_path.name}"


@pytest.fixture
def dead_owner() -> str:
    """The marker of a process that has ended."""
    process = subprocess.Popen(["/bin/sleep", "600"])
    stat = procfs.read_stat(process.pid)
    assert stat is not None
    process.kill()
    process.wait()
    return f"{process.pid}:{stat.proc.start}:{procfs.pid_space()}"


@pytest.fixture
def sleeper(run_id: str) -> Iterator[Sleeper]:
    started: list[subprocess.Popen[bytes]] = []

    def go(
        owner: str | None,
        *,
        code: str = _SLEEP,
        args: tuple[str, ...] = (),
    ) -> subprocess.Popen[bytes]:
        env = dict(os.environ)
        if owner is not None:
            env |= {procfs.RUN_ID: run_id, procfs.INSTANCE: "decode-0", procfs.OWNER: owner}
        process = subprocess.Popen([sys.executable, "-c", code, *args], env=env, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        started.append(process)
        return process

    yield go
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_only_processes_of_dead_runs_are_found(sleeper: Sleeper, run_id: str, dead_owner: str) -> None:
    left = sleeper(dead_owner, args=("--api-key", "k-123456789"))
    sleeper(procfs.owner_marker())
    sleeper(None)
    sleeper(dead_owner.rsplit(":", 1)[0] + ":4026999999")
    sleeper("nonsense")
    found = find_leftovers(run_id)
    assert [f.proc.pid for f in found] == [left.pid]
    assert found[0].instance == "decode-0"
    assert found[0].run_id == run_id
    assert "k-123456789" not in str(found[0])
    assert f"pid {left.pid}" in str(found[0])
    assert left.pid in [f.proc.pid for f in find_leftovers()]
    assert find_leftovers("another run") == []


def test_clean_ends_polite_and_stubborn_ones(sleeper: Sleeper, run_id: str, dead_owner: str) -> None:
    polite, stubborn = sleeper(dead_owner), sleeper(dead_owner, code=_STUBBORN)
    bystander = sleeper(procfs.owner_marker())
    assert clean(find_leftovers(run_id), grace_s=0.5) == []
    assert polite.wait(10) == -signal.SIGTERM
    assert stubborn.wait(10) == -signal.SIGKILL
    assert bystander.poll() is None
    assert find_leftovers(run_id) == []


def test_the_session_of_a_marked_leader_is_found_whole(run_id: str, dead_owner: str) -> None:
    env = {procfs.RUN_ID: run_id, procfs.INSTANCE: "decode-0", procfs.OWNER: dead_owner}
    code = "env -i sleep 600 & echo on; wait"
    with subprocess.Popen(
        ["/bin/sh", "-c", code], env=env, start_new_session=True, stdout=subprocess.PIPE
    ) as leader:
        assert leader.stdout is not None
        leader.stdout.readline()
        stat = procfs.read_stat(leader.pid)
        assert stat is not None
        while not any(procfs.environ(s.proc.pid) == {} for s in procfs.session_of(stat.proc)):
            time.sleep(0.02)  # until env has dropped the marker
        found = find_leftovers(run_id)
        assert len(found) == 2
        assert {f.instance for f in found} == {"decode-0"}
        assert clean(found, grace_s=1.0) == []


def test_a_recycled_pid_is_left_alone(sleeper: Sleeper) -> None:
    """The list is a minute old; the pid belongs to somebody else now."""
    process = sleeper(None)
    stat = procfs.read_stat(process.pid)
    assert stat is not None
    stale = Leftover(procfs.Proc(process.pid, stat.proc.start - 1), "r", "decode-0", "x", 1.0)
    assert clean([stale], grace_s=0.0) == []
    time.sleep(0.2)
    assert process.poll() is None
