"""Stubborn children: whatever a process does, nothing of it is left after `stop`, and its end is told as it was."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from pytest_pdperf.engines.base import Command
from pytest_pdperf.stack import procfs
from pytest_pdperf.stack.logs import read_lines
from pytest_pdperf.stack.ports import PortRegistry
from pytest_pdperf.stack.processes import Exit, ManagedProcess

Start = Callable[..., ManagedProcess]
_FAKE = Path(__file__).with_name("fake_engine.py")
_PATIENCE_S = 30.0


@pytest.fixture
def run_id(tmp_path: Path) -> str:
    return f"test-{tmp_path.parent.name}-{tmp_path.name}"


@pytest.fixture
def start(tmp_path: Path, run_id: str) -> Iterator[Start]:
    started: list[ManagedProcess] = []

    def go(*argv: str, env: Mapping[str, str | None] | None = None, log_cap: int = 2**20) -> ManagedProcess:
        command = Command(argv, env or {})
        log = tmp_path / f"p{len(started)}.log"
        started.append(ManagedProcess(f"p{len(started)}", command, log=log, run_id=run_id, log_cap=log_cap))
        return started[-1]

    yield go
    for process in started:
        process.stop(0.0)
    assert procfs.marked(run_id) == []


def engine(start: Start, port: int, **env: str) -> ManagedProcess:
    """The fake engine with FAKE_* variables."""
    argv = (sys.executable, "-I", "-S", str(_FAKE), "p0", "127.0.0.1", str(port), "m", "server")
    return start(*argv, env={f"FAKE_{k}": v for k, v in env.items()})


def until(true: Callable[[], object], what: str) -> None:
    limit = time.monotonic() + _PATIENCE_S
    while not true():
        assert time.monotonic() < limit, f"never: {what}"
        time.sleep(0.02)


def said(process: ManagedProcess, text: str) -> None:
    until(lambda: any(text in line for line in read_lines(process.log)), text)


def exit_of(process: ManagedProcess) -> Exit:
    until(process.poll, "an end")
    end = process.poll()
    assert end is not None
    return end


def pid_of(process: ManagedProcess) -> int:
    until(lambda: process.poll() is None and process.pid, "its pid")
    assert process.pid is not None
    return process.pid


def stat_of(pid: int) -> procfs.Stat:
    stat = procfs.read_stat(pid)
    assert stat is not None
    return stat


def listening(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    registry = PortRegistry(tmp_path / "ports")
    yield registry.reserve("test").first
    registry.close()


def test_a_polite_child_ends_by_sigterm_within_its_grace(start: Start, port: int) -> None:
    process = engine(start, port)
    said(process, "Starting vLLM server")
    began = time.monotonic()
    assert process.stop(60.0) == ()
    assert time.monotonic() - began < 30
    assert exit_of(process) == Exit(-signal.SIGTERM)
    assert not listening(port)


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(start: Start, port: int) -> None:
    process = engine(start, port, IGNORE_TERM="1")
    said(process, "Starting vLLM server")
    began = time.monotonic()
    assert process.stop(1.0) == ()
    assert time.monotonic() - began >= 1.0
    assert exit_of(process).code == -signal.SIGKILL


def test_a_grandchild_in_its_own_session_gives_up_its_port(start: Start, port: int) -> None:
    process = engine(start, port + 1, SETSID_PORT=str(port))
    said(process, "Starting vLLM server")
    until(lambda: listening(port), "the grandchild listens")
    assert process.stop(1.0) == ()
    assert not listening(port)


def test_a_double_fork_with_an_empty_environment_does_not_hide(start: Start, port: int) -> None:
    process = engine(start, port, DOUBLE_FORK="1")
    said(process, "Starting vLLM server")
    child = stat_of(pid_of(process))
    hidden = [s for s in procfs.all_stats().values() if s.ppid == child.ppid and s.proc != child.proc]
    assert len(hidden) == 1, "the orphan is adopted by the reaper"
    assert procfs.environ(hidden[0].proc.pid) == {}
    assert process.stop(0.5) == ()
    assert not procfs.is_alive(hidden[0].proc)


def test_a_grandchild_goes_when_the_child_dies_by_itself(start: Start, port: int) -> None:
    """The engine-core case: the API server is gone, its core must not keep the GPU."""
    process = engine(start, port + 1, SETSID_PORT=str(port), DIE_AFTER="1")
    until(lambda: listening(port), "the grandchild listens")
    assert exit_of(process).code == 9
    until(lambda: not listening(port), "the port is given up without a stop")


def test_killing_only_the_direct_child_leaves_nothing(start: Start, port: int) -> None:
    process = engine(start, port + 1, SETSID_PORT=str(port))
    until(lambda: listening(port), "the grandchild listens")
    procfs.send(stat_of(pid_of(process)).proc, signal.SIGKILL)
    end = exit_of(process)
    assert end.code == -signal.SIGKILL
    assert "somebody sent it" in end.describe()
    assert process.stop(0.5) == ()
    assert not listening(port)


def test_a_killed_reaper_takes_its_child_along_and_the_rest_goes_at_stop(start: Start, port: int) -> None:
    process = engine(start, port + 1, SETSID_PORT=str(port))
    until(lambda: listening(port), "the grandchild listens")
    child = stat_of(pid_of(process))
    reaper = stat_of(child.ppid)
    procfs.send(reaper.proc, signal.SIGKILL)
    assert "reaper was killed" in exit_of(process).describe()
    until(lambda: not procfs.is_alive(child.proc), "PDEATHSIG reached the child")
    assert process.stop(0.5) == ()
    assert not listening(port)


def test_a_child_without_an_environment_is_found_by_its_session_when_the_reaper_was_killed(
    start: Start, port: int
) -> None:
    """Seen with vLLM 0.32: the engine core renames itself, and its environment in /proc is gone."""
    process = engine(start, port, NAMELESS_CHILD="1")
    said(process, "Starting vLLM server")
    child = stat_of(pid_of(process))
    nameless = [s.proc for s in procfs.descendants(child.proc.pid)]
    assert [procfs.environ(p.pid) for p in nameless] == [{}]
    procfs.send(stat_of(child.ppid).proc, signal.SIGKILL)
    assert process.stop(0.5) == ()
    assert not procfs.is_alive(nameless[0])


def test_a_stopped_reaper_does_not_block_the_end(
    start: Start, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_pdperf.stack.processes._REAPER_SLACK_S", 0.5)
    process = engine(start, port, DOUBLE_FORK="1")
    said(process, "Starting vLLM server")
    child = stat_of(pid_of(process))
    reaper = stat_of(child.ppid)
    below = [s.proc for s in procfs.descendants(reaper.proc.pid)]
    assert len(below) == 2, "the child and its hidden orphan"
    procfs.send(reaper.proc, signal.SIGSTOP)
    assert process.stop(0.2) == ()
    assert not [p for p in (*below, reaper.proc) if procfs.is_alive(p)]


def test_stray_signals_to_the_reaper_change_nothing(start: Start, port: int) -> None:
    process = engine(start, port)
    said(process, "Starting vLLM server")
    reaper = stat_of(stat_of(pid_of(process)).ppid)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        procfs.send(reaper.proc, signum)
    time.sleep(0.5)
    assert process.poll() is None
    assert listening(port)


def test_a_death_in_start_up_is_told_with_its_code_and_last_words(start: Start, port: int) -> None:
    process = engine(start, port, DIE="3")
    assert exit_of(process) == Exit(3)
    assert read_lines(process.log)[-1] == "ValueError: max_model_len 999 is too large"


def test_the_last_words_are_in_the_log_when_the_end_is_known(start: Start) -> None:
    """No newline, much output, immediate exit: still complete at the moment `poll` answers."""
    process = start(
        sys.executable, "-c", "import sys; sys.stdout.write('a\\n' * 20000 + 'the end'); sys.exit(2)"
    )
    assert exit_of(process).code == 2
    lines = read_lines(process.log)
    assert lines[-1] == "the end"
    assert lines.count("a") == 20000


def test_a_program_that_does_not_exist_is_named(start: Start) -> None:
    process = start("/nonexistent/vllm", "serve")
    end = exit_of(process)
    assert end.code is None
    assert "/nonexistent/vllm" in end.describe()
    assert process.stop(1.0) == ()


def test_printing_forever_neither_fills_the_disk_nor_delays_the_end(
    start: Start, port: int, tmp_path: Path
) -> None:
    cap = 256 * 1024
    argv = (sys.executable, "-I", "-S", str(_FAKE), "p0", "127.0.0.1", str(port), "m", "server")
    process = start(*argv, env={"FAKE_PRINT_FOREVER": "1"}, log_cap=cap)
    until((tmp_path / "p0.log.1").exists, "the log rotates")
    assert process.stop(20.0) == ()
    total = sum(p.stat().st_size for p in tmp_path.glob("p0.log*"))
    assert total <= cap + 2**20  # one read may overshoot
    assert exit_of(process).code == -signal.SIGTERM
    assert read_lines(tmp_path / "p0.log")[0] == "fake engine p0 starts", "the start-up is kept"


def test_a_silent_child_is_fine(start: Start, port: int) -> None:
    process = engine(start, port, QUIET="1")
    until(lambda: listening(port), "it serves")
    assert read_lines(process.log) == []
    assert process.stop(5.0) == ()


def test_secrets_do_not_reach_the_log(start: Start) -> None:
    code = "import os; print('token is', os.environ['HF_TOKEN']); print('Authorization: Bearer abcdef0123456789')"
    process = start(
        sys.executable, "-c", code, "--api-key", "k-1234567890", env={"HF_TOKEN": "verysecretvalue"}
    )
    assert exit_of(process).code == 0
    text = process.log.read_text()
    assert "verysecretvalue" not in text
    assert "abcdef0123456789" not in text
    assert text.count("***") == 2
    assert "k-1234567890" not in process.shown()


def test_secrets_are_not_on_the_reapers_command_line(start: Start) -> None:
    process = start("/bin/sleep", "60", env={"HF_TOKEN": "verysecretvalue"})
    reaper = stat_of(pid_of(process)).ppid
    assert b"verysecretvalue" not in Path(f"/proc/{reaper}/cmdline").read_bytes()
    assert "verysecretvalue" not in str(procfs.environ(reaper))


def test_the_environment_is_the_commands_with_the_marker(start: Start, run_id: str) -> None:
    code = "import os; print(sorted(k for k in os.environ if k in ('A', 'HOME', 'PYTEST_CURRENT_TEST')))"
    process = start(sys.executable, "-c", code, env={"A": "1", "HOME": None})
    exit_of(process)
    assert read_lines(process.log) == ["['A']"]
    process = start("/bin/sleep", "60")
    env = procfs.environ(pid_of(process))
    assert env[procfs.RUN_ID] == run_id
    assert env["SPT_NOENV"], "or a process that renames itself overwrites all this"
    assert procfs.owner_alive(env[procfs.OWNER]) is True


def test_children_can_be_interrupted_although_their_reaper_cannot(start: Start) -> None:
    """Ignored signals survive exec: a reaper that ignored SIGTERM would make every engine ignore it."""
    process = start(
        "/bin/sh", "-c", "trap 'echo got it; exit 5' INT; echo ready; while :; do sleep 0.1; done"
    )
    said(process, "ready")
    procfs.send(stat_of(pid_of(process)).proc, signal.SIGINT)
    assert exit_of(process).code == 5


def test_stop_is_idempotent_and_a_second_one_may_cut_the_grace(
    start: Start, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_pdperf.stack.processes._REAPER_SLACK_S", 60.0)
    process = engine(start, port, IGNORE_TERM="1")
    said(process, "Starting vLLM server")
    process.ask_to_stop(600.0)
    began = time.monotonic()
    assert process.stop(0.1) == ()
    assert process.stop(0.1) == ()
    assert time.monotonic() - began < 50


@pytest.mark.parametrize(
    ("end", "want", "not_want"),
    [
        (Exit(-9, {"cgroup": 1, "system": 1}), "memory cgroup", "somebody"),
        (Exit(-9, {"system": 1}), "this machine", "somebody"),
        (Exit(-9), "no kernel OOM kill", "host memory"),
        (Exit(1, {"cgroup": 1}), "exit code 1 (host memory", "somebody"),
        (Exit(-11), "killed by SIGSEGV", "("),
        (Exit(1), "exit code 1", "memory"),
        (Exit(None, error="cannot start x"), "cannot start x", "exit code"),
    ],
)
def test_how_an_end_is_described(end: Exit, want: str, not_want: str) -> None:
    assert want in end.describe()
    assert not_want not in end.describe()


def test_another_process_of_the_same_run_and_name_is_left_alone(
    start: Start, tmp_path: Path, run_id: str
) -> None:
    """Workers of one run, and topologies that are up at the same time, all have a `router` and a `decode-0`."""
    first = start("/bin/sleep", "600")
    second = ManagedProcess(
        first.id, Command(("/bin/sleep", "600")), log=tmp_path / "second.log", run_id=run_id
    )
    try:
        pid_of(first)
        pid_of(second)
        assert first.stop(0.0) == ()
        time.sleep(0.3)  # its reaper would tell of a kill
        assert second.poll() is None
        assert len(procfs.marked(run_id)) == 2, "the second and its reaper"
    finally:
        second.stop(0.0)
