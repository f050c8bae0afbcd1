"""Stands between pytest and one engine or router, so that the death of either leaves nothing behind.

Why a process of its own. PR_SET_PDEATHSIG reaches only a direct child, and it fires when the *thread* that
forked ends, so pytest cannot protect vLLM's engine cores (grandchildren) and could kill an engine by ending
a thread. The reaper has one thread, watches pytest through a pidfd and a pipe, and is the subreaper of all
it starts: a double fork, a new session or an emptied environment does not hide a process from it. Its
direct child gets PDEATHSIG from it in turn; that is safe to set between fork and exec here, because nothing
else runs in this process.

It also writes the log (time stamps, masked secrets, bounded size), so a busy pytest never blocks an
engine's output.

Protocol: the first line on stdin is a `Job` as a JSON object, later lines are `stop GRACE_SECONDS`. Events
go to stdout as JSON lines: started, failed, ended, gone. Standard library only, started with -I -S.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

from pytest_pdperf.stack import procfs
from pytest_pdperf.stack.logwriter import LogWriter

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_FOR_S = 5.0
"""How long SIGKILL is repeated before survivors are reported (a driver call can make one immune)."""
_REST_GRACE_S = 3.0
"""Grace for descendants once the child itself has ended."""
_TICK_MS = 200


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


class Job(NamedTuple):
    """What to run. It comes over a pipe because environments hold secrets and command lines are public."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str | None
    cpus: Sequence[int]
    """CPUs to run on; empty for no preference."""
    owner: int
    """Pid of the process whose death ends everything."""
    log: str
    log_cap: int
    """Most bytes that the log's files take together."""
    secrets: Sequence[str]
    orphan_grace_s: float
    """Grace when the owner is gone."""


class Reaper:
    """One child, its descendants and its log, for as long as pytest wants them."""

    def __init__(self, job: Job, commands: bytes = b"") -> None:
        self.job = job
        self.log = LogWriter(job.log, job.log_cap, tuple(job.secrets))
        self.child = 0
        self.output: int | None = None
        self.child_status: int | None = None
        self.deadline: float | None = None
        """When the grace ends; None while nobody asked for an end."""
        self.commands = commands
        self.oom_before = procfs.oom_kills()

    def run(self) -> None:
        """Start the child, serve until it and all its descendants are gone."""
        owner_fd = self._watch_owner()
        if owner_fd is None:
            return
        output = self._start()
        if output is None:
            return
        self.output = output
        poller = select.poll()
        for fd in (0, output, owner_fd):
            poller.register(fd, select.POLLIN | select.POLLHUP)
        os.set_blocking(0, False)
        os.set_blocking(output, False)
        while True:
            for fd, _ in poller.poll(_TICK_MS):
                if fd == output and not self._pump(output):
                    poller.unregister(output)
                    self.output = None
                elif fd == 0 and not self._read_commands():
                    poller.unregister(0)
                    self._end_soon(self.job.orphan_grace_s)
                elif fd == owner_fd:
                    poller.unregister(owner_fd)
                    self._end_soon(self.job.orphan_grace_s)
            self.log.flush_partial()
            self._reap()
            if self.deadline is not None:
                left = self._living()
                if not left and self.child_status is not None:
                    break
                if time.monotonic() >= self.deadline:
                    self._kill_all()
                    break
        if self.output is not None:
            self._pump(self.output)
        self._reap()
        self.log.close()
        survivors = [f"{s.proc.pid} (state {s.state})" for s in self._living()]
        _say(event="gone", survivors=survivors)

    def _watch_owner(self) -> int | None:
        try:
            fd = os.pidfd_open(self.job.owner)
        except ProcessLookupError:
            return None
        except OSError:
            fd = os.open("/dev/null", os.O_WRONLY)  # no pidfd on this kernel: the pipe alone has to do
        if os.getppid() != self.job.owner:
            return None
        return fd

    def _start(self) -> int | None:
        read_end, write_end = os.pipe()
        try:
            popen = subprocess.Popen(
                self.job.argv,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env=dict(self.job.env),
                cwd=self.job.cwd,
                start_new_session=True,
                preexec_fn=self._in_child,  # noqa: PLW1509 - safe: this process has one thread
            )
        except (OSError, subprocess.SubprocessError) as error:
            _say(event="failed", error=f"cannot start {self.job.argv[0]}: {error}")
            return None
        os.close(write_end)
        self.child = popen.pid
        stat = procfs.read_stat(popen.pid)
        _say(event="started", pid=popen.pid, start=stat.proc.start if stat else 0)
        return read_end

    def _in_child(self) -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.job.cpus:
            os.sched_setaffinity(0, self.job.cpus)

    def _pump(self, fd: int) -> bool:
        """Move what is there to the log, at most 1 MiB at a time so that commands are not starved."""
        for _ in range(16):
            try:
                data = os.read(fd, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.log.feed(data)
        return True

    def _read_commands(self) -> bool:
        try:
            data = os.read(0, 4096)
        except BlockingIOError:
            return True
        if not data:
            return False
        self.commands += data
        while b"\n" in self.commands:
            line, _, self.commands = self.commands.partition(b"\n")
            word, _, value = line.decode().partition(" ")
            if word == "stop":
                self._end_soon(float(value))
        return True

    def _end_soon(self, grace_s: float) -> None:
        """SIGTERM the group once, and be done after `grace_s` at the latest; an earlier end stands."""
        deadline = time.monotonic() + grace_s
        if self.deadline is not None:
            self.deadline = min(self.deadline, deadline)
            return
        self.deadline = deadline
        if self.child_status is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.child, signal.SIGTERM)
                os.killpg(self.child, signal.SIGCONT)  # a stopped process could not even begin to end

    def _living(self) -> list[procfs.Stat]:
        return [s for s in procfs.descendants(os.getpid()) if s.state not in "ZX"]

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child and self.child_status is None:
                self.child_status = os.waitstatus_to_exitcode(status)
                # Its last words belong in the log before anybody hears of its end.
                if self.output is not None:
                    self._pump(self.output)
                self.log.flush_partial(0.0)
                after = procfs.oom_kills()
                grew = {k: after[k] - v for k, v in self.oom_before.items() if after.get(k, v) > v}
                _say(event="ended", code=self.child_status, oom_kills=grew)
                # What it leaves behind (engine cores in a session of their own) is of no use without it.
                procfs.send_all((s.proc for s in self._living()), signal.SIGTERM)
                self._end_soon(_REST_GRACE_S)

    def _kill_all(self) -> None:
        """SIGKILL everything below, again and again: a process may fork while it is being listed."""
        give_up = time.monotonic() + _KILL_FOR_S
        while time.monotonic() < give_up:
            living = self._living()
            if not living and self.child_status is not None:
                return
            procfs.send_all((s.proc for s in living), signal.SIGKILL)
            time.sleep(0.01)
            self._reap()


def _say(**event: object) -> None:
    with suppress(OSError):  # pytest may be gone; the work goes on
        os.write(1, json.dumps(event).encode() + b"\n")


def main() -> NoReturn:
    """Entry point; see the module's text for the protocol."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        # The ways to end it are the pipe and the pidfd; a stray signal must not leave an engine
        # without a reaper.
        # A handler, not SIG_IGN: exec resets handlers in the child but would hand SIG_IGN down.
        signal.signal(signum, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    data = b""
    while b"\n" not in data:
        more = os.read(0, 65536)
        if not more:
            os._exit(0)
        data += more
    line, _, rest = data.partition(b"\n")
    try:
        Reaper(Job(**json.loads(line)), rest).run()
    except Exception as error:
        # Whatever went wrong (no log file, no memory), the one thing that must not fail is the ending.
        _say(event="failed", error=f"the reaper failed: {type(error).__name__}: {error}")
        for stat in procfs.descendants(os.getpid()):
            procfs.send(stat.proc, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
