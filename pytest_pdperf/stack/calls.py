"""Machines are often lent for minutes, not for a night: divide a run into calls that each end inside their limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_pdperf.errors import UsageProblem


@dataclass(frozen=True, slots=True)
class Call:
    """What one reservation does: one bring-up of one topology and some of its cells, in order."""

    topology: str
    cells: tuple[str, ...]
    seconds: float
    """Start-up, cells and tear-down."""
    resumes: bool
    """An earlier call has begun this run, so `--resume` keeps what it measured."""


def divide(
    cells: Mapping[str, Sequence[tuple[str, float]]], *, start_up_s: float, limit_s: float
) -> tuple[Call, ...]:
    """Put each topology's cells, (id, seconds) in order, into as few calls of `limit_s` seconds as that order allows.

    Every call pays `start_up_s` for its own bring-up and tear-down. Raises UsageProblem for a cell that fits no call.
    """
    calls: list[Call] = []
    for topology, wanted in cells.items():
        held: list[str] = []
        spent = start_up_s
        for cell, seconds in wanted:
            if start_up_s + seconds > limit_s:
                raise UsageProblem(
                    f"{topology} {cell}: {start_up_s:.0f} s start-up and {seconds:.0f} s of measuring do not fit "
                    f"{limit_s:.0f} s; take a workload with fewer requests, such as fixed-shapes-short"
                )
            if held and spent + seconds > limit_s:
                calls.append(Call(topology, tuple(held), spent, resumes=bool(calls)))
                held, spent = [], start_up_s
            held.append(cell)
            spent += seconds
        if held:
            calls.append(Call(topology, tuple(held), spent, resumes=bool(calls)))
    return tuple(calls)
