"""One role as a step of a job: srun stands for it here, with its output, its exit code and its end."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_pdperf.engines.base import Command
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.stack.logs import read_lines
from pytest_pdperf.stack.processes import Exit, ManagedProcess, environment
from pytest_pdperf.stack.slurm.client import Slurm, foreign_variables
from pytest_pdperf.stack.slurm.job import ORPHAN_GRACE_S, scancel

FREE_AGAIN_S = 60
"""How long srun waits for a place in the job: steps of an earlier launch need seconds to end."""
FORCE_S = 45.0
"""For srun to end a step by force; Slurm itself waits `KillWait` (30 s by default) for processes to die."""

_HEADER = "pdperf step"
_INTRO = (
    f'echo "{_HEADER} $SLURM_JOB_ID.$SLURM_STEP_ID on $SLURMD_NODENAME, '
    'CUDA_VISIBLE_DEVICES ${CUDA_VISIBLE_DEVICES-unset}, GPUs of the node ${SLURM_STEP_GPUS-none}"; exec "$@"'
)
"""Names the step in its own log, which is how we learn its number; the command follows as words, never as a text."""
_STEP = re.compile(rf"{_HEADER} (\d+\.\d+) on (\S+),")


@dataclass(frozen=True, slots=True)
class Share:
    """What a step takes of its job's node."""

    node: str
    gpus: int
    cpus: int
    gres: str = "gpu"


def srun(job: str, id: str, share: Share, argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command that runs `argv` as a step.

    --exact leaves the job's other CPUs and GPUs to other steps; --mem=0 shares the job's memory instead of taking all
    of it, which would keep every other step waiting.
    """
    return (
        *(
            "srun",
            f"--jobid={job}",
            f"--job-name={id}",
            f"--nodelist={share.node}",
            "--nodes=1",
            "--ntasks=1",
        ),
        *("--exact", f"--cpus-per-task={share.cpus}", "--mem=0"),
        f"--gres={share.gres}:{share.gpus}" if share.gpus else "--gres=none",
        *(f"--immediate={FREE_AGAIN_S}", "--mpi=none", "--input=none", "--kill-on-bad-exit=1"),
        *("sh", "-c", _INTRO, "pdperf", *argv),
    )


def step_command(
    job: str,
    id: str,
    share: Share,
    inner: Command,
    hosts: tuple[str, ...],
    base: Mapping[str, str] | None = None,
) -> Command:
    """srun with the environment of `inner`, less what a surrounding job would tell srun, and less a choice of GPUs.

    Slurm sets CUDA_VISIBLE_DEVICES inside the step. `hosts` are reached without a proxy.
    """
    base = os.environ if base is None else base
    usual = environment(inner, "", id, base)
    env: dict[str, str | None] = dict(inner.env)
    if share.gpus:
        env |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"))
    env |= dict.fromkeys(foreign_variables(base))
    env["PATH"] = usual.get("PATH")
    for name in ("NO_PROXY", "no_proxy"):
        env[name] = ",".join(dict.fromkeys([*usual[name].split(","), *hosts]))
    return replace(inner, argv=srun(job, id, share, inner.argv), env=env)


class SlurmStep:
    """A step that was started. It ends when srun is told to end it, and with its job in any case."""

    def __init__(
        self,
        id: str,
        command: Command,
        run: Slurm,
        *,
        node: str,
        log: Path,
        run_id: str,
        base: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.id, self._node, self._run, self._clock, self._sleep = id, node, run, clock, sleep
        self._srun = ManagedProcess(
            id, command, log=log, run_id=run_id, base=base, orphan_grace_s=ORPHAN_GRACE_S
        )
        self._asked = False
        self._until = float("inf")
        self._left: tuple[str, ...] | None = None
        self._number: str | None = None

    @property
    def log(self) -> Path:
        """Output of the step and of srun, on this machine."""
        return self._srun.log

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that are masked in the log."""
        return self._srun.secrets

    @property
    def pid(self) -> int | None:
        """Pid of srun on this machine."""
        return self._srun.pid

    @property
    def number(self) -> str | None:
        """`JOB.STEP`, known once the step has begun."""
        if self._number is None:
            for line in read_lines(self.log)[:50]:
                if match := _STEP.search(line):
                    self._number = match[1]
        return self._number

    def poll(self) -> Exit | None:
        """How the step ended, None while it runs. srun exits with 128 + the signal that ended its task."""
        end = self._srun.poll()
        if end is None or end.code is None:
            return end
        code = 128 - end.code if 128 < end.code <= 192 else end.code
        return Exit(code, where=self._node)

    def session(self) -> tuple[int, ...]:
        """Pids of srun."""
        return self._srun.session()

    def stopped(self) -> tuple[str, ...]:
        """Of srun: the step's processes cannot be seen from here."""
        return self._srun.stopped()

    def age_s(self) -> float:
        """Seconds since the start."""
        return self._srun.age_s()

    def kill(self) -> None:
        """SIGKILL the step's processes through Slurm, as a crash would end them."""
        if self.number is not None:
            scancel(self._run, self.number, "KILL")

    def ask_to_stop(self, grace_s: float) -> None:
        """SIGTERM to the step's processes through Slurm; srun itself would kill them at once."""
        self._until = min(self._until, self._clock() + grace_s)
        if not self._asked and grace_s > 0 and self._srun.poll() is None and self.number is not None:
            self._asked = True
            scancel(self._run, self.number, "TERM")

    def wait_stopped(self) -> tuple[str, ...]:
        """Wait for the end; after the grace srun ends the step by force."""
        if self._left is not None:
            return self._left
        while self._asked and self._srun.poll() is None and self._clock() < self._until:
            self._sleep(0.05)
        left = self._srun.stop(FORCE_S)
        end = self._srun.poll()
        clean = end is not None and end.code is not None and end.code >= 0
        if not clean and self.number is not None:
            # srun was killed: nobody has told Slurm, and the step goes on.
            left += self._end_step(self.number)
        self._left = left
        return left

    def _end_step(self, number: str, patience_s: float = 15.0) -> tuple[str, ...]:
        until = self._clock() + patience_s
        while True:
            with suppress(UsageProblem):
                job = number.partition(".")[0]
                listed = self._run("squeue", "--noheader", "--steps", f"--jobs={job}", "-o", "%i")
                if number not in listed.out.split():
                    return ()
            if self._clock() > until:
                return (f"{self.id}: Slurm step {number} on {self._node} does not end",)
            scancel(self._run, number, "KILL")
            self._sleep(0.25)
