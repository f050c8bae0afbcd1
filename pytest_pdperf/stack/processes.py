"""Starts, watches and ends one engine or router, through a reaper that outlives pytest's own death."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pytest_pdperf.engines.base import Command
from pytest_pdperf.stack import procfs
from pytest_pdperf.stack.logs import segments
from pytest_pdperf.stack.secrets import mask, secret_values

LOG_CAP = 64 * 2**20
"""Most bytes that one process's log files take together."""

_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from pytest_pdperf.stack.reaper import main; main()"
_ROOT = Path(__file__).parents[2]
_REAPER_SLACK_S = 8.0
"""Beyond the grace: the reaper's own SIGKILL phase and its exit."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended."""

    code: int | None
    """Exit code, minus the signal's number, or None when it never started or cannot be told."""
    oom_kills: Mapping[str, int] = field(default_factory=dict)
    """Kernel OOM kills counted while it lived: `cgroup` (its memory limit), `system`."""
    error: str = ""
    """Why there is no code."""
    where: str = ""
    """Another machine that it ran on, whose kernel was not asked; empty for this one."""

    def describe(self) -> str:
        """One phrase, such as `exit code 1` or `killed by SIGKILL (...)`.

        A kernel OOM kill (host memory) is told apart from a plain SIGKILL and from a CUDA out-of-memory
        error, which is an exception in the log.
        """
        if self.code is None:
            return self.error or "ended, exit code unknown"
        if self.code >= 0:
            text = f"exit code {self.code}"
        else:
            try:
                text = f"killed by {signal.Signals(-self.code).name}"
            except ValueError:
                text = f"killed by signal {-self.code}"
        if "cgroup" in self.oom_kills:
            return f"{text} (host memory: the kernel's OOM killer ended a process of this memory cgroup)"
        if "system" in self.oom_kills:
            return f"{text} (host memory: the kernel's OOM killer ended a process of this machine meanwhile)"
        if self.where:
            return f"{text} on {self.where}"
        if self.code == -signal.SIGKILL:
            return f"{text} (no kernel OOM kill was counted: somebody sent it)"
        return text


def environment(
    command: Command, run_id: str, instance: str, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a child: ours, the command's, and the marker by which a run is found."""
    base = os.environ if base is None else base
    env = {k: v for k, v in base.items() if not k.startswith(("PYTEST_", "COV_CORE_"))}
    env.setdefault("PYTHONUNBUFFERED", "1")
    # Engine cores rename themselves (setproctitle), which by default overwrites the environment in /proc, the marker
    # in it too.
    env["SPT_NOENV"] = "1"
    program = Path(command.argv[0])
    if program.is_absolute():
        # Engines call tools of their own environment (ninja for kernels) by name.
        parts = [p for p in env.get("PATH", "").split(os.pathsep) if p]
        if str(program.parent) not in parts:
            env["PATH"] = os.pathsep.join([str(program.parent), *parts])
    for name in ("NO_PROXY", "no_proxy"):
        # A proxy meant for the outside world would otherwise see, delay or refuse loopback traffic.
        have = [p for p in env.get(name, "").split(",") if p]
        env[name] = ",".join([*have, *(h for h in ("127.0.0.1", "localhost") if h not in have)])
    for key, value in command.env.items():
        if value is None:
            env.pop(key, None)
        else:
            env[key] = value
    env[procfs.RUN_ID] = run_id
    env[procfs.INSTANCE] = instance
    env[procfs.OWNER] = procfs.owner_marker()
    return env


class ManagedProcess:
    """One child with its log. Every descendant of it is gone when `stop` returns, or named in its answer.

    When this process dies, the child has `orphan_grace_s` between SIGTERM and SIGKILL: enough to leave shared memory
    and the GPU tidy, short enough to promise that all is gone within 5 s. A child that must still tell somebody else
    (Slurm's controller) needs more.
    """

    def __init__(
        self,
        id: str,
        command: Command,
        *,
        log: Path,
        run_id: str,
        log_cap: int = LOG_CAP,
        cpus: Sequence[int] = (),
        base: Mapping[str, str] | None = None,
        orphan_grace_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id = id
        self.command = command
        self.log = log.absolute()
        self.run_id = run_id
        self.pid: int | None = None
        """Pid of the child itself, known soon after the start."""
        self.started_at = clock()
        self._clock = clock
        self._exit: Exit | None = None
        self._buffer = b""
        self._eof = False
        self._child: procfs.Proc | None = None
        self._stop_asked = False
        self._survivors: tuple[str, ...] | None = None
        self._mark = uuid.uuid4().hex
        env = environment(command, run_id, id, base) | {procfs.PROCESS: self._mark}
        self.secrets = secret_values(env)
        job = {
            "argv": command.argv,
            "env": env,
            "cwd": str(command.cwd) if command.cwd else None,
            "cpus": list(cpus),
            "owner": os.getpid(),
            "log": str(self.log),
            "log_cap": log_cap,
            "secrets": self.secrets,
            "orphan_grace_s": orphan_grace_s,
        }
        self.log.parent.mkdir(parents=True, exist_ok=True)
        for old in segments(self.log):
            old.unlink()  # nobody may take an earlier launch's lines for this one's
        marker = {name: env[name] for name in (procfs.RUN_ID, procfs.INSTANCE, procfs.OWNER, procfs.PROCESS)}
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, str(_ROOT), f"pdperf-reaper:{id}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={k: os.environ[k] for k in ("PATH", "LANG", "LC_ALL", "TZ") if k in os.environ} | marker,
        )
        assert self._reaper.stdout is not None
        os.set_blocking(self._reaper.stdout.fileno(), False)
        self._tell(json.dumps(job))

    def poll(self) -> Exit | None:
        """How the process ended, None while it runs. Never blocks."""
        self._read_events()
        if self._exit is None and self._eof:
            self._exit = Exit(None, error="its reaper was killed from outside")
        return self._exit

    def session(self) -> tuple[int, ...]:
        """Pids of the child's session: itself and what it started, as far as that did not leave it."""
        if self._child is None:
            return ()
        return tuple(s.proc.pid for s in procfs.session_of(self._child))

    def stopped(self) -> tuple[str, ...]:
        """One line for each process of the child's session that a signal or a debugger has stopped."""
        if self._child is None:
            return ()
        return tuple(
            f"pid {s.proc.pid} is stopped by {'a debugger' if s.state == 't' else 'a signal (SIGSTOP, SIGTSTP)'}"
            for s in procfs.session_of(self._child)
            if s.state in "Tt"
        )

    def kill(self) -> None:
        """SIGKILL the child and what it started, as a crash would; `poll` then tells of it like of any other end."""
        if self._child is not None:
            procfs.send_all((s.proc for s in procfs.session_of(self._child)), signal.SIGKILL)

    def age_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self.started_at

    def shown(self) -> str:
        """The command line for people, secrets masked."""
        return mask(" ".join(self.command.argv), self.secrets)

    def ask_to_stop(self, grace_s: float) -> None:
        """SIGTERM to the process group now, SIGKILL to every descendant after `grace_s`. Returns at once.

        A later call can only shorten the grace.
        """
        self._stop_asked = True
        self._grace_until = self._clock() + grace_s
        self._tell(f"stop {grace_s:.3f}")

    def stop(self, grace_s: float = 10.0) -> tuple[str, ...]:
        """End the process and everything it started; returns what could not be killed, normally nothing.

        Idempotent. Interrupted by Ctrl-C it may be called again, with a shorter grace.
        """
        if self._survivors is not None:
            return self._survivors
        self.ask_to_stop(grace_s)
        return self.wait_stopped()

    def wait_stopped(self) -> tuple[str, ...]:
        """Wait for the end that `ask_to_stop` asked for; returns what could not be killed."""
        if self._survivors is not None:
            return self._survivors
        limit = max(0.0, self._grace_until - self._clock()) + _REAPER_SLACK_S
        try:
            self._reaper.wait(limit)
        except subprocess.TimeoutExpired:
            # A stopped or wedged reaper: its descendants die by our hand, then it does.
            below = procfs.descendants(self._reaper.pid)
            procfs.send_all((s.proc for s in below), signal.SIGKILL)
            self._reaper.kill()
            self._reaper.wait()
        self._read_events()
        self.poll()
        self._survivors = self._sweep()
        for pipe in (self._reaper.stdin, self._reaper.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        return self._survivors

    def _sweep(self, patience_s: float = 3.0) -> tuple[str, ...]:
        """Kill what still carries our marker or belongs to the child's session: the reaper may have been killed."""
        give_up = time.monotonic() + patience_s
        while left := self._ours():
            procfs.send_all((s.proc for s in left), signal.SIGKILL)
            if time.monotonic() > give_up:
                return tuple(f"{self.id}: pid {s.proc.pid} (state {s.state})" for s in left)
            time.sleep(0.05)
        return ()

    def _ours(self) -> list[procfs.Stat]:
        session = procfs.session_of(self._child) if self._child is not None else []
        return list({s.proc: s for s in procfs.marked(self.run_id, self._mark) + session}.values())

    def _tell(self, line: str) -> None:
        if self._reaper.stdin is None or self._reaper.stdin.closed:
            return
        with suppress(BrokenPipeError):
            self._reaper.stdin.write(line.encode() + b"\n")
            self._reaper.stdin.flush()

    def _read_events(self) -> None:
        out = self._reaper.stdout
        if out is None or out.closed:
            return
        while not self._eof:
            if not select.select([out], [], [], 0)[0]:
                break
            data = os.read(out.fileno(), 65536)
            self._eof = not data
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, event: Mapping[str, object]) -> None:
        match event:
            case {"event": "started", "pid": int(pid), "start": int(start)}:
                self.pid = pid
                self._child = procfs.Proc(pid, start)
            case {"event": "failed", "error": str(error)}:
                self._exit = Exit(None, error=error)
            case {"event": "ended", "code": int(code), "oom_kills": dict(kills)}:
                self._exit = Exit(code, {str(k): int(v) for k, v in kills.items()})
