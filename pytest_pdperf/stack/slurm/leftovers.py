"""Finds jobs that a run left in the queue although it is dead: they hold GPUs until their time limit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_pdperf.stack import procfs
from pytest_pdperf.stack.slurm.client import Slurm, asked
from pytest_pdperf.stack.slurm.job import MARK, scancel


@dataclass(frozen=True, slots=True)
class LeftJob:
    """A job of ours whose run is not known to live."""

    id: str
    name: str
    state: str
    dead: bool
    """True when its run is dead; False when it was started on another machine, or before this one booted."""

    def __str__(self) -> str:
        whose = "its run is dead" if self.dead else "of another machine, or from before this one booted"
        return f"Slurm job {self.id} ({self.name}, {self.state.lower()}): {whose}"


def left_jobs(
    run: Slurm, alive: Callable[[str], bool | None] = procfs.owner_alive, user: int | None = None
) -> list[LeftJob]:
    """This user's jobs that carry the mark of a run which does not live here. Raises UsageProblem."""
    uid = os.getuid() if user is None else user
    out = asked(run, "squeue", "--noheader", f"--user={uid}", "-o", "%i|%j|%T|%k")
    found = []
    for line in out.splitlines():
        id, name, state, comment = (*line.strip().split("|", 3), "", "", "")[:4]
        lives = alive(comment.removeprefix(MARK)) if comment.startswith(MARK) else True
        if lives is not True:
            found.append(LeftJob(id, name, state, lives is False))
    return found


def cancel(run: Slurm, jobs: Sequence[LeftJob]) -> None:
    """Cancel the jobs of dead runs, and no others."""
    for job in jobs:
        if job.dead:
            scancel(run, job.id)
