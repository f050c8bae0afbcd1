"""`--overlap-start`: the next topology comes up while this one is measured, where GPUs of their own allow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .errors import BringUpError, RoleDied, UsageProblem
from .gpus.disjoint import uuids_of, why_not_together
from .gpus.placement import Placement
from .measuring import TopologyLaunch
from .options import Settings
from .stack.beside import LaunchBeside
from .stack.launch import Stack

OPTION = "--overlap-start"

Start = Callable[[TopologyLaunch], LaunchBeside]
"""Plans a launch and begins to bring it up. Raises UsageProblem, having started nothing."""


def possible_here(config: Any, settings: Settings) -> tuple[Settings, list[str]]:
    """The settings as pytest's `config` allows: without the option under xdist, and then a line that says so.

    Only a process that measures every item, in the order in which they were collected, knows which topology is next.
    """
    alone = not hasattr(config, "workerinput") and getattr(config.option, "dist", "no") == "no"
    if alone or not settings["overlap_start"]:
        return settings, []
    line = f"{OPTION} has no effect under xdist: each worker has an order of its own"
    return replace(settings, values={**settings.values, "overlap_start": False}), [line]


class Overlap:
    """At most one launch beside the measured one. All methods are called from pytest's main thread."""

    def __init__(self, asked: bool, start: Start, say: Callable[..., None]) -> None:
        self.asked = asked
        self._start = start
        self._say = say
        self._order: tuple[TopologyLaunch, ...] = ()
        self._placements: Mapping[str, Placement] = {}
        self._no_room = ""
        self._beside: tuple[TopologyLaunch, LaunchBeside] | None = None

    def prepare(
        self, order: Sequence[TopologyLaunch], placements: Mapping[str, Placement], no_room: str = ""
    ) -> None:
        """Tell in which order launches will be measured, where each runs, and why there is room for one alone if so."""
        self._order, self._placements, self._no_room = tuple(order), placements, no_room

    def pairs(self) -> list[tuple[TopologyLaunch, TopologyLaunch, str]]:
        """(launch, the next one, why the next cannot come up beside it: empty when it can) of the whole run."""
        return [
            (one, other, self._why_not(one, other))
            for one, other in zip(self._order, self._order[1:], strict=False)
        ]

    def describe(self) -> list[str]:
        """Lines for `--plan`."""
        if not self.asked:
            return []
        return [
            f"{OPTION}: {other.id} starts "
            + (f"after {one.id} has ended: {why}" if why else f"while {one.id} is measured")
            for one, other, why in self.pairs()
        ]

    def begin_after(self, current: TopologyLaunch) -> str:
        """Begin to bring up what comes after `current`; the reason when that has to wait, else empty."""
        if not self.asked or self._beside is not None or current not in self._order[:-1]:
            return ""
        after = self._order[self._order.index(current) + 1]
        why = self._why_not(current, after)
        if not why:
            try:
                self._beside = after, self._start(after)
            except UsageProblem as problem:
                why = str(problem)
        if why:
            line = f"{OPTION}: {after.id} starts after {current.id} has ended: {why}"
            self._say(line)
            return line
        self._say(f"bringing up {after.id} meanwhile ({OPTION})")
        return ""

    def take(self, launch: TopologyLaunch) -> Stack | None:
        """The stack of `launch` when it was started beside another; None when it was not, or has died since.

        Waits until it is ready. Raises BringUpError when its bring-up failed.
        """
        if self._beside is None or self._beside[0] != launch:
            return None
        beside = self._beside[1]
        try:
            stack = beside.result()
        except BringUpError:
            self._beside = None
            raise
        self._beside = None
        for line in beside.said:
            self._say(line, detail=True)
        try:
            stack.check()
        except RoleDied as death:
            self._say(f"{launch.id}: {death.instance} {death.reason}, before its turn; bringing it up again")
            stack.close()
            return None
        return stack

    def drop(self, but: TopologyLaunch | None = None) -> tuple[str, ...]:
        """End what is beside unless it is `but`; returns what could not be killed."""
        if self._beside is None or self._beside[0] == but:
            return ()
        try:
            return self._beside[1].drop()
        finally:
            self._beside = None

    def uuids(self) -> frozenset[str]:
        """Devices in use beside the measured stack."""
        if self._beside is None:
            return frozenset()
        return uuids_of(self._placements[self._beside[0].topology.name])

    def disturbs(self) -> str:
        """What is going on beside the measured stack now; empty for nothing."""
        if self._beside is None:
            return ""
        launch, beside = self._beside
        return f"{launch.id} came up beside it" if beside.coming_up else f"{launch.id} stood by beside it"

    def _why_not(self, one: TopologyLaunch, other: TopologyLaunch) -> str:
        if one.topology.name == other.topology.name:
            return "it is the same topology, on the same GPUs"
        if self._no_room:
            return self._no_room
        first, second = (self._placements[launch.topology.name] for launch in (one, other))
        return why_not_together(first, second)
