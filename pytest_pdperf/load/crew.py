"""The worker processes of one run: started, watched, told when to begin, and stopped together."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson

from pytest_pdperf.errors import UsageProblem

from .job import PARENT
from .progress import Progress

POLL_S = 0.1
AHEAD_NS = 50_000_000
"""How far ahead the common start lies: time for every process to read the line that names it."""
STORE_S = 30.0
"""How long a worker that was asked to stop may take to store what it has."""


class LoadError(Exception):
    """The load generator itself failed - not the server: no records, and nothing to compare."""


class Worker:
    """One load process with its own folder."""

    def __init__(self, job_file: Path, folder: Path, name: str, number: int, fds: Sequence[int]) -> None:
        self.folder = folder
        self.name = name
        self.state: Progress | None = None
        self._log = folder / "worker.log"
        self._pending = b""
        self.silent = False
        """It has closed its output: it is about to end, or has."""
        folder.mkdir(parents=True, exist_ok=True)
        for stale in ("records.json", "stamps.bin"):
            (folder / stale).unlink(missing_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest_pdperf.load.worker", str(job_file), str(folder), str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                pass_fds=tuple(fds),
                env={**os.environ, PARENT: str(os.getpid()), "PYTHONPATH": _import_path()},
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._out.fileno(), False)

    @property
    def output(self) -> int:
        """Descriptor on which its progress comes."""
        return self._out.fileno()

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    @property
    def failed(self) -> bool:
        """Whether it has ended without a result."""
        return self._process.poll() not in (None, 0)

    def listen(self) -> bool:
        """Take in what it tells. True when that was news."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.output, 65536):
                self._pending += chunk
            self.silent = True
        *lines, self._pending = self._pending.split(b"\n")
        if lines:
            self.state = Progress.from_json(orjson.loads(lines[-1]))
        return bool(lines)

    def begin(self, origin_ns: int) -> None:
        """Tell it when the clock starts."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._in.fileno(), b"%d\n" % origin_ns)

    def ask_to_stop(self) -> None:
        """Have it store what it has measured, and end."""
        if not self.over:
            self._process.terminate()

    def kill(self) -> None:
        """End its process group if it still runs, and reap it."""
        if not self.over:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._in.close()
        self._out.close()

    def reason(self) -> str:
        """How and why it ended."""
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"{self.name} ended with {how}: {self._last_line()}"

    def refuse(self) -> None:
        """Raise UsageProblem when it has refused its input."""
        if self._process.returncode == 2:
            raise UsageProblem(self._last_line())

    def _last_line(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "no message"


def watch(
    workers: Sequence[Worker],
    deadline_s: float,
    on_progress: Callable[[Progress], None] | None = None,
    check: Callable[[], None] | None = None,
) -> Worker | None:
    """Wait until all have ended; start their clocks together when all are ready. Returns the first that failed, if any.

    The others are then asked to store what they have and waited for. Raises LoadError past the deadline, and whatever
    `check` raises, which is called about ten times a second.
    """
    end = time.monotonic() + deadline_s
    begun = len(workers) == 1
    culprit = None
    while True:
        over = [worker.over for worker in workers]
        news = [worker.listen() for worker in workers]
        if on_progress is not None and any(news):
            on_progress(together([w.state for w in workers if w.state is not None]))
        if all(over):
            return culprit or next((w for w in workers if w.failed), None)
        if culprit is None and (culprit := next((w for w in workers if w.failed), None)) is not None:
            end = min(end, time.monotonic() + STORE_S)
            for worker in workers:
                worker.ask_to_stop()
        if check is not None:
            check()
        if time.monotonic() > end:
            if culprit is not None:
                return culprit
            raise LoadError(f"load worker did not end within {deadline_s:.0f} s and was killed")
        if not begun and all(w.state is not None and w.state.phase == "ready" for w in workers):
            begun = True
            origin = time.time_ns() + AHEAD_NS
            for worker in workers:
                worker.begin(origin)
        _wait(workers)


def _wait(workers: Sequence[Worker]) -> None:
    """Until one tells something, at most `POLL_S`; shortly when only ends are awaited."""
    talking = [worker.output for worker in workers if not worker.silent]
    select.select(talking, [], [], POLL_S if talking else POLL_S / 10)


def together(states: Sequence[Progress]) -> Progress:
    """Progress of the whole: the phase of the slowest, sums of the rest."""
    phases = ("connect", "warm-up", "ready", "measure", "decode")
    return Progress(
        phase=min((s.phase for s in states), key=phases.index),
        done=sum(s.done for s in states),
        total=sum(s.total for s in states),
        in_flight=sum(s.in_flight for s in states),
        failed=sum(s.failed for s in states),
        elapsed_s=max(s.elapsed_s for s in states),
        tokens=sum(s.tokens for s in states),
        ttft_ms=tuple(ms for s in states for ms in s.ttft_ms),
        itl_ms=tuple(ms for s in states for ms in s.itl_ms),
    )


def _import_path() -> str:
    """PYTHONPATH that finds this very package, installed or not."""
    root = str(Path(__file__).resolve().parents[2])
    rest = os.environ.get("PYTHONPATH", "")
    return f"{root}{os.pathsep}{rest}" if rest else root
