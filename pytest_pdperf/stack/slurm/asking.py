"""The size of a job and the command that asks Slurm for it: what the user may add and what the topology decides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_pdperf.errors import UsageProblem

OPTION = "--slurm-arg"
_TOPOLOGY, _LAUNCHER = "the topology", "the launcher"
_OWNED = {
    "gres": "--slurm-gres and the topology",
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"), _TOPOLOGY),
    **dict.fromkeys(("ntasks", "ntasks-per-node", "ntasks-per-gpu", "job-name", "comment"), _LAUNCHER),
    **dict.fromkeys(("no-shell", "quiet", "no-bell", "jobid", "kill-command"), _LAUNCHER),
}
"""Options of salloc with another owner -> who it is."""

_SHORT = {
    "A": "account",
    "C": "constraint",
    "c": "cpus-per-task",
    "G": "gpus",
    "J": "job-name",
    "N": "nodes",
    "n": "ntasks",
    "p": "partition",
    "q": "qos",
    "t": "time",
    "w": "nodelist",
    "x": "exclude",
}


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user says about the job, read from `--slurm-arg`."""

    args: tuple[str, ...] = ()
    """For salloc, without the number of nodes."""
    nodes: int | None = None
    partition: str | None = None

    @property
    def sets_cpus(self) -> bool:
        """True when the user decides how many CPUs the job gets."""
        return any(arg.startswith("--cpus-per-") for arg in self.args)


def read_wish(texts: Sequence[str]) -> Wish:
    """Read `KEY=VALUE` and `KEY`, long names of salloc's options. Raises UsageProblem for what is decided elsewhere."""
    args: list[str] = []
    nodes = partition = None
    for text in texts:
        name, separator, value = text.strip().partition("=")
        name = name.lstrip("-").replace("_", "-")
        place = f"{OPTION} {text!r}"
        if not re.fullmatch(r"[A-Za-z][A-Za-z-]*", name):
            raise UsageProblem(f"{place}: want a long option of salloc, such as partition=gpu or exclusive")
        if name in _SHORT:
            raise UsageProblem(f"{place}: write the long name: {_SHORT[name]}{separator}{value}")
        if name in _OWNED:
            raise UsageProblem(f"{place}: {name} is decided by {_OWNED[name]}; leave it out")
        if name == "nodes":
            if not re.fullmatch(r"[1-9][0-9]{0,4}", value):
                raise UsageProblem(f"{place}: want one number of nodes, such as nodes=2")
            nodes = int(value)
            continue
        if name == "partition":
            partition = value
        args.append(f"--{name}{separator}{value}")
    return Wish(tuple(args), nodes, partition)


@dataclass(frozen=True, slots=True)
class Size:
    """What a job is asked to have. Every node has the same, as Slurm gives it to a job that is not heterogeneous."""

    nodes: int
    gpus: int
    """On each node; 0 to ask for none."""
    cpus: int
    """On each node."""
    gres: str = "gpu"


_HOLD = ("--no-bell", "--kill-command=KILL")
"""Options that only salloc has."""


def salloc(
    size: Size, wish: Wish, *, name: str, comment: str, keep: Sequence[str] = ("sleep", "infinity")
) -> tuple[str, ...]:
    """The command that asks for a job and holds it while `keep` runs on this machine.

    salloc gives the job back on SIGTERM, also while it is pending, and when `keep` ends; `keep` is killed when the job
    is lost, since salloc would wait for it for ever.
    """
    cpus = () if wish.sets_cpus else (f"--cpus-per-task={size.cpus}",)
    gres = (f"--gres={size.gres}:{size.gpus}",) if size.gpus else ()
    return (
        *("salloc", f"--job-name={name}", f"--comment={comment}", *_HOLD),
        *(f"--nodes={size.nodes}", "--ntasks-per-node=1", *cpus, *gres),
        *wish.args,
        *keep,
    )


def forecast(size: Size, wish: Wish) -> tuple[str, ...]:
    """The command that asks Slurm when such a job would start, without submitting it."""
    command = salloc(size, wish, name="pdperf-plan", comment="plan", keep=())
    return ("sbatch", "--test-only", *(word for word in command[1:] if word not in _HOLD), "--wrap=true")
