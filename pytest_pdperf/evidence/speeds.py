"""How fast each engine was by its own clocks, whole and half by half: what a slow link or role is told from. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

from pytest_pdperf.spec.topology import Role

from .deltas import restarted
from .exposition import Snapshot, Unknown
from .names import Quantity
from .readings import change, observations

Pages = Mapping[str, Snapshot | Unknown]


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast one engine was over one window; None where its page does not tell."""

    step_s: float | None = None
    """Mean time from a token to the next, seconds."""
    prefill_s: float | None = None
    """Mean time of one prompt's prefill, seconds."""
    link_rate: float | None = None
    """Bytes per second while its transfers ran."""


MEASURES = tuple(field.name for field in fields(Speed))

Speeds = Mapping[str, tuple[Speed, ...]]
"""Instance id -> its speed over the whole cell; where somebody looked in the middle, over both halves too."""


@dataclass(frozen=True, slots=True)
class Level:
    """What is usual of one speed, and how far from it is still usual."""

    value: float
    limit: float
    """Largest factor by which it may be slower in a cell of which nothing else is known."""
    suspected: float
    """The same where a metric of the cell became worse already, and the question is why."""


@dataclass(frozen=True, slots=True)
class Usual:
    """The speeds of healthy cells of the same load: batches change a mean, so no others compare."""

    speeds: Mapping[str, tuple[Mapping[str, Level], ...]] = field(default_factory=dict)
    """Instance id -> measure -> level, for each window of `Speeds`."""
    loading_s: Mapping[str, Level] = field(default_factory=dict)
    why_not: str = ""
    """Why there is nothing to compare with; empty where there is."""


def speeds(before: Pages, after: Pages, roles: Mapping[str, Role]) -> dict[str, Speed]:
    """Instance id -> its speed between two looks."""
    return {name: _speed(before.get(name), after.get(name), role) for name, role in roles.items()}


def windows(pages: Sequence[Pages], roles: Mapping[str, Role]) -> dict[str, tuple[Speed, ...]]:
    """Speeds over the whole and, where a look in the middle has a page of the engine, from look to look."""
    found = {}
    for name, role in roles.items():
        first, last = pages[0].get(name), pages[-1].get(name)
        inside = [page for one in pages[1:-1] if isinstance(page := one.get(name), Snapshot)]
        looks = (first, *inside, last) if inside else ()
        found[name] = (_speed(first, last, role), *(_speed(a, b, role) for a, b in pairwise(looks)))
    return found


def _speed(old: Snapshot | Unknown | None, new: Snapshot | Unknown | None, role: Role) -> Speed:
    if not isinstance(old, Snapshot) or not isinstance(new, Snapshot) or restarted(old, new):
        return Speed()
    volume, seconds = (
        step(old, new, quantity) for quantity in (Quantity.TRANSFER_BYTES, Quantity.TRANSFER_SECONDS)
    )
    return Speed(
        step_s=None if role is Role.PREFILL else _mean(old, new, Quantity.INTER_TOKEN_SECONDS),
        prefill_s=None if role is Role.DECODE else _mean(old, new, Quantity.PREFILL_SECONDS),
        link_rate=volume / seconds if volume and seconds else None,
    )


def step(old: Snapshot, new: Snapshot, quantity: Quantity) -> float | None:
    """Increase of a quantity from page to page, None where it is not known."""
    value = change(old, new, quantity)
    return None if isinstance(value, Unknown) else value


def _mean(old: Snapshot, new: Snapshot, quantity: Quantity) -> float | None:
    seen = observations(old, new, quantity)
    return None if isinstance(seen, Unknown) else seen.mean
