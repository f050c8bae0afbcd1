"""The job that a run lives in: asked for and held here, or found because pytest itself runs inside of one."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_pdperf.engines.base import Command
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.stack import procfs
from pytest_pdperf.stack.logs import read_lines
from pytest_pdperf.stack.processes import ManagedProcess
from pytest_pdperf.stack.slurm.client import PLACE, Slurm, asked, foreign_variables
from pytest_pdperf.stack.slurm.nodes import parse_gres

ORPHAN_GRACE_S = 30.0
"""For the programs of Slurm when pytest is dead: they must still reach the controller."""
TICK_S = 0.25
TELL_S = 30.0
"""Between two progress lines while the reason stays the same."""
GONE_S = 15.0
"""A cancelled job leaves the queue in about a second; nodes may take longer to clean up."""

_NUMBER = re.compile(r"salloc: (?:Pending job|Granted job|job) (?:allocation )?(\d+)")
_NODE_LINE = re.compile(
    r"^\s*Nodes=(?P<nodes>\S+) CPU_IDs=(?P<cpus>\S+)(?:.*?\bGRES=(?P<gres>\S*))?", re.MULTILINE
)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class JobNode:
    """A node of a job and what the job has of it."""

    name: str
    cpus: int
    gpus: int
    gres_types: tuple[str, ...] = ()
    """Names under which Slurm counts the GPUs, such as `gpu:h100`."""


@dataclass(frozen=True, slots=True)
class Job:
    """A running job."""

    id: str
    nodes: tuple[JobNode, ...]
    ours: bool
    """We asked for it, so we give it back; False when pytest runs inside of it."""
    ends: str = ""
    """When its time limit is over, as Slurm writes it; empty when it has none."""


def read_job(run: Slurm, id: str, *, gres: str, ours: bool) -> Job:
    """Nodes of a running job with what it has of each. Raises UsageProblem when Slurm does not say it."""
    text = asked(run, "scontrol", "show", "job", "--details", id)
    nodes: list[JobNode] = []
    for match in _NODE_LINE.finditer(text):
        found = parse_gres(match["gres"] or "")
        mine = {name: n for name, n in found.items() if name == gres or name.startswith(f"{gres}:")}
        names = asked(run, "scontrol", "show", "hostnames", match["nodes"]).split()
        nodes += [JobNode(name, _count(match["cpus"]), sum(mine.values()), tuple(mine)) for name in names]
    if not nodes:
        raise UsageProblem(f"{PLACE}: scontrol does not say on which nodes job {id} runs")
    ends = re.search(r"\bEndTime=(\S+)", text)
    return Job(id, tuple(nodes), ours, ends[1] if ends and ends[1] not in ("Unknown", "NONE") else "")


def _count(ids: str) -> int:
    """How many numbers `0-3,6` names."""
    ends = [part.partition("-") for part in ids.split(",")]
    return sum(int(high or low) - int(low) + 1 for low, _, high in ends if low.isdigit())


@dataclass(frozen=True, slots=True)
class State:
    """Where a job stands."""

    name: str
    """`PENDING`, `RUNNING`, ...; empty when the queue no longer has it, UNKNOWN when it does not answer."""
    reason: str = ""
    start: str = ""
    """When Slurm expects it to start; empty when it does not say."""


def job_state(run: Slurm, id: str) -> State:
    """Ask the queue. A job that it no longer knows has an empty name; without an answer the state is UNKNOWN.

    A controller that is busy for a moment is no reason to give a running job up.
    """
    try:
        answer = run("squeue", "--noheader", f"--jobs={id}", "--states=all", "-o", "%T|%r|%S")
    except UsageProblem as problem:
        return State("UNKNOWN", str(problem).removeprefix(f"{PLACE}: "))
    parts = answer.out.strip().split("|")
    if answer.code != 0 or len(parts) != 3:
        if answer.code == 0 or "Invalid job id" in answer.err:
            return State("")
        return State("UNKNOWN", f"squeue failed: {answer.said}")
    return State(parts[0], parts[1], "" if parts[2] in ("N/A", "Unknown") else parts[2])


OVER = (
    "",
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "PREEMPTED",
    "NODE_FAIL",
    "REVOKED",
    "DEADLINE",
    "OUT_OF_MEMORY",
)
"""States of a job that has ended; COMPLETING is not among them: its processes may still run."""


MARK = "pdperf="
"""Begins the comment of every job that we ask for; what follows names the process that asked."""

HOPELESS = frozenset(
    {
        *(
            "AccountNotAllowed",
            "BadConstraints",
            "InvalidAccount",
            "InvalidQOS",
            "JobHeldAdmin",
            "JobHeldUser",
        ),
        *(
            "PartitionConfig",
            "PartitionDown",
            "PartitionInactive",
            "PartitionNodeLimit",
            "PartitionTimeLimit",
        ),
        *("QOSNotAllowed", "ReservationDeleted", "QOSMaxNodePerUserLimit", "QOSMaxWallDurationPerJobLimit"),
        *(
            "AssocMaxNodePerJobLimit",
            "AssocMaxWallDurationPerJobLimit",
            "AssocMaxGRESPerJob",
            "QOSMaxGRESPerJob",
        ),
        *("QOSMaxNodePerJobLimit",),
    }
)
"""Reasons to be pending that do not pass by waiting."""


def scancel(run: Slurm, id: str, signal: str | None = None) -> None:
    """Cancel a job or step, or send it a signal. Never raises: whoever ends something looks whether it has ended."""
    with suppress(UsageProblem):
        run("scancel", *([f"--signal={signal}"] if signal else []), id)


def owner_comment() -> str:
    """What marks a job as ours in Slurm: `pdperf doctor` tells by it whether the run still lives."""
    return MARK + procfs.owner_marker()


class JobHolder:
    """Holds a job with a child that gives it back, also when this process is killed: its reaper ends the child.

    A job outlives its holder only when the reaper and salloc are both killed with SIGKILL or their machine goes down;
    then it ends with its time limit.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        run: Slurm,
        *,
        log: Path,
        run_id: str,
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.command = command
        self._run, self._clock, self._sleep = run, clock, sleep
        self._process = ManagedProcess(
            "slurm-job",
            Command(command, dict.fromkeys(foreign_variables(environ))),
            log=log,
            run_id=run_id,
            orphan_grace_s=ORPHAN_GRACE_S,
        )

    @property
    def job_id(self) -> str | None:
        """Known once Slurm has taken the job."""
        found = [match[1] for line in read_lines(self._process.log) if (match := _NUMBER.match(line))]
        return found[-1] if found else None

    @property
    def ended(self) -> bool:
        """True when the job was refused, given back or lost."""
        return self._process.poll() is not None

    def said(self) -> str:
        """What salloc printed, without its own name."""
        lines = [line.removeprefix("salloc: ").strip() for line in read_lines(self._process.log)]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return "; ".join(dict.fromkeys(errors or lines)) or "nothing"

    def wait(self, deadline_s: float, tell: Progress) -> str:
        """Wait until the job runs and return its number; tells why it is pending.

        Raises UsageProblem, with the job gone, when Slurm refuses it, when it pends for a reason that waiting does
        not change, and when it still pends after `deadline_s`.
        """
        began = told = self._clock()
        shown = ""
        state = State("")
        while True:
            if self.ended:
                raise UsageProblem(
                    f"{PLACE}: Slurm refused the job: {self.said()}\n  asked with: {shlex.join(self.command)}"
                )
            job = self.job_id
            if job is not None:
                state = job_state(self._run, job)
                if state.name == "RUNNING":
                    return job
                if state.name == "PENDING" and state.reason in HOPELESS:
                    self.release()
                    raise UsageProblem(
                        f"{PLACE}: job {job} could never start ({state.reason}) and was cancelled\n"
                        f"  asked with: {shlex.join(self.command)}"
                    )
                text = f"Slurm job {job} is {state.name.lower() or 'submitted'}"
                text += f": {state.reason}" if state.reason not in ("", "None") else ""
                now = self._clock()
                if text != shown or now - told >= TELL_S:
                    when = f" (Slurm expects it to start at {state.start})" if state.start else ""
                    tell(f"{text}{when}, {now - began:.0f} s of at most {deadline_s:g} s")
                    shown, told = text, now
            if self._clock() - began > deadline_s:
                self.release()
                why = f" ({state.reason})" if state.reason else ""
                raise UsageProblem(
                    f"{PLACE}: job {job or '?'} is still {state.name.lower() or 'unanswered'}{why} after "
                    f"{deadline_s:g} s and was cancelled; wait longer with --gpu-wait, or choose another partition "
                    "with --slurm-arg"
                )
            self._sleep(TICK_S)

    def release(self) -> tuple[str, ...]:
        """Give the job back and wait until the queue no longer runs it; idempotent. One line for what is left."""
        job = self.job_id
        if job is not None and not self.ended:
            scancel(self._run, job)
        left = self._process.stop(ORPHAN_GRACE_S)
        if job is None:
            return left
        until = self._clock() + GONE_S
        while (state := job_state(self._run, job)).name not in OVER:
            if self._clock() > until:
                why = f" ({state.reason})" if state.name == "UNKNOWN" else ""
                return (
                    *left,
                    f"Slurm job {job} is still {state.name.lower()}{why} {GONE_S:g} s after scancel {job}",
                )
            scancel(self._run, job)
            self._sleep(TICK_S)
        return left
