"""Talks to Slurm through its own programs, which exist on every cluster, in the version that the cluster has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pytest_pdperf.errors import UsageProblem

PLACE = "--launcher slurm"
TIMEOUT_S = 30.0
"""A busy controller answers within seconds; Slurm's own time-out of one message is 10 s by default."""
OLDEST = (21, 8)
"""First release with `srun --exact`, without which a step takes all CPUs of its job."""

_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")
_VARIABLE = re.compile(r"(SLURM|SLURMD|SRUN)_\w+")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program of Slurm said."""

    code: int
    out: str
    err: str = ""

    @property
    def said(self) -> str:
        """The lines that explain a failure, joined."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return "; ".join(dict.fromkeys(lines)) or f"exit status {self.code}"


class Slurm(Protocol):
    """Runs one program of Slurm to its end; tests bring a recorded one."""

    def __call__(self, *argv: str) -> Answer:
        """The answer. Raises UsageProblem when there is no such program or no answer in time."""


def slurm(*argv: str) -> Answer:
    """Run it on this machine, out of the terminal's reach, so that Ctrl-C cannot cut a cancellation short."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            env=own_environment(os.environ),
            start_new_session=True,
            check=False,
        )
    except FileNotFoundError:
        raise UsageProblem(
            f"{PLACE}: no program {argv[0]} on PATH; run where Slurm's client programs are installed"
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageProblem(
            f"{PLACE}: no answer from {argv[0]} within {TIMEOUT_S:g} s; is the controller up (scontrol ping)?"
        ) from None
    return Answer(done.returncode, done.stdout, done.stderr)


def asked(run: Slurm, *argv: str) -> str:
    """The output of a question to Slurm. Raises UsageProblem that quotes Slurm when it failed."""
    answer = run(*argv)
    if answer.code != 0:
        raise UsageProblem(f"{PLACE}: {argv[0]} failed: {answer.said}")
    return answer.out


def foreign_variables(env: Mapping[str, str]) -> tuple[str, ...]:
    """Variables of a surrounding job that srun and salloc would take for options, such as SLURM_CPUS_PER_TASK.

    A user's own defaults for salloc (SALLOC_ACCOUNT) stay.
    """
    return tuple(name for name in env if _VARIABLE.fullmatch(name) and name not in _KEPT)


def own_environment(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without those, and with times that can be read by a program."""
    out = foreign_variables(env)
    return {name: value for name, value in env.items() if name not in out} | {"SLURM_TIME_FORMAT": "standard"}


def check_version(run: Slurm) -> str:
    """Version of the installed Slurm. Raises UsageProblem for one that is too old."""
    if shutil.which("srun") is None:
        raise UsageProblem(
            f"{PLACE}: no program srun on PATH; run where Slurm's client programs are installed"
        )
    text = asked(run, "srun", "--version").strip()
    found = re.search(r"(\d+)\.(\d+)(?:\.\d+)?", text)
    if found and (int(found[1]), int(found[2])) < OLDEST:
        raise UsageProblem(f"{PLACE}: {text} has no `srun --exact`; it takes Slurm 21.08 or newer")
    return found[0] if found else text
