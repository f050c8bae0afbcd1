"""What comes up beside the measured topology, when it may not and why, and who hears of its failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_pdperf.errors import BringUpError, RoleDied, UsageProblem
from pytest_pdperf.gpus.grammar import Device
from pytest_pdperf.gpus.placement import Placed, Placement
from pytest_pdperf.measuring import TopologyLaunch
from pytest_pdperf.options import Settings
from pytest_pdperf.overlap import Overlap, possible_here
from pytest_pdperf.spec.topology import Role, Topology
from pytest_pdperf.stack.beside import LaunchBeside


def launch(name: str, number: int = 1) -> TopologyLaunch:
    roles = {"server": {"replicas": 1}}
    return TopologyLaunch(
        Topology.model_validate({"name": name, "kind": "aggregated", "roles": roles}), number
    )


def on(*gpus: int) -> Placement:
    devices = tuple(Device(str(gpu), uuid=f"GPU-{gpu}", index=gpu) for gpu in gpus)
    return Placement((Placed("server-0", Role.SERVER, devices, None, "", ""),))


A, A2, B, C = launch("a"), launch("a", 2), launch("b"), launch("c")
PLACEMENTS = {"a": on(0, 1), "b": on(2, 3), "c": on(3)}


class FakeStack:
    def __init__(self, dead: bool = False) -> None:
        self.dead, self.closed = dead, False

    def check(self) -> None:
        if self.dead:
            raise RoleDied("router", "exit code 1", "")

    def close(self) -> tuple[str, ...]:
        self.closed = True
        return ()


class FakeBeside:
    said = ("server-0: healthy",)

    def __init__(self) -> None:
        self.coming_up, self.dropped = True, False
        self.outcome: FakeStack | BaseException = FakeStack()

    def result(self) -> FakeStack:
        self.coming_up = False
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def drop(self) -> tuple[str, ...]:
        self.dropped = True
        return ("pid 7",)


class House:
    def __init__(self, *order: TopologyLaunch, asked: bool = True) -> None:
        self.started: list[tuple[str, FakeBeside]] = []
        self.said: list[str] = []
        self.refuse = ""
        self.overlap = Overlap(asked, self.start, lambda text, detail=False: self.said.append(text))
        self.overlap.prepare(order, PLACEMENTS)

    def start(self, launch_: TopologyLaunch) -> LaunchBeside:
        if self.refuse:
            raise UsageProblem(self.refuse)
        self.started.append((launch_.id, FakeBeside()))
        return cast(LaunchBeside, self.started[-1][1])

    @property
    def latest(self) -> FakeBeside:
        return self.started[-1][1]


def test_nothing_starts_unless_asked() -> None:
    house = House(A, B, asked=False)
    assert house.overlap.begin_after(A) == ""
    assert (house.started, house.said, house.overlap.describe()) == ([], [], [])


def test_the_next_one_starts_once_and_is_taken_in_its_turn() -> None:
    house = House(A, B)
    assert house.overlap.begin_after(A) == ""
    assert house.overlap.begin_after(A) == "", "after a role of `a` died it comes up again"
    assert [name for name, _ in house.started] == ["b"]
    assert house.overlap.take(A) is None
    assert house.overlap.disturbs() == "b came up beside it"
    assert house.overlap.uuids() == {"GPU-2", "GPU-3"}
    house.latest.coming_up = False
    assert house.overlap.disturbs() == "b stood by beside it"
    assert house.overlap.drop(but=B) == ()
    assert house.overlap.take(B) is cast(Any, house.latest.outcome)
    assert (house.overlap.disturbs(), house.overlap.uuids()) == ("", frozenset())
    assert "server-0: healthy" in house.said
    assert house.overlap.begin_after(B) == "", "nothing comes after the last"
    assert house.overlap.drop() == () and not house.latest.dropped


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [(A, A2, "the same topology"), (B, C, "both use GPU 3")],
    ids=["same", "shared"],
)
def test_what_cannot_be_up_together_starts_in_its_turn_and_says_why(
    first: TopologyLaunch, second: TopologyLaunch, why: str
) -> None:
    house = House(first, second)
    line = house.overlap.begin_after(first)
    assert f"--overlap-start: {second.id} starts after {first.id} has ended: " in line and why in line
    assert house.said == [line] == house.overlap.describe()
    assert house.started == []
    assert house.overlap.take(second) is None


def test_where_there_is_room_for_one_nothing_starts_beside_it() -> None:
    house = House(A, B)
    house.overlap.prepare((A, B), PLACEMENTS, "a job is as large as one topology")
    assert house.overlap.begin_after(A).endswith("has ended: a job is as large as one topology")
    assert house.started == []


def test_a_plan_that_is_refused_beside_another_is_a_reason_to_wait() -> None:
    house = House(A, B)
    house.refuse = "b router: port 8000 is reserved by pid 1"
    assert house.overlap.begin_after(A).endswith("has ended: b router: port 8000 is reserved by pid 1")
    assert house.overlap.take(B) is None


def test_a_failed_start_is_told_to_its_own_launch_once() -> None:
    house = House(A, B)
    house.overlap.begin_after(A)
    house.latest.outcome = BringUpError("server-0 ended")
    assert house.overlap.take(A) is None
    with pytest.raises(BringUpError, match="server-0 ended"):
        house.overlap.take(B)
    assert house.overlap.take(B) is None, "the next try is an ordinary one"
    assert house.overlap.uuids() == frozenset()


def test_a_ctrl_c_while_waiting_leaves_something_to_drop() -> None:
    house = House(A, B)
    house.overlap.begin_after(A)
    house.latest.outcome = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        house.overlap.take(B)
    assert house.overlap.drop() == ("pid 7",)
    assert house.latest.dropped


def test_a_stack_that_died_before_its_turn_comes_up_again() -> None:
    house = House(A, B)
    house.overlap.begin_after(A)
    stack = house.latest.outcome = FakeStack(dead=True)
    assert house.overlap.take(B) is None
    assert stack.closed
    assert house.said[-1] == "b: router exit code 1, before its turn; bringing it up again"


def test_what_is_not_next_after_all_is_dropped() -> None:
    house = House(A, B, C)
    house.overlap.begin_after(A)
    assert house.overlap.drop(but=C) == ("pid 7",)
    assert house.latest.dropped
    assert house.overlap.uuids() == frozenset()


@pytest.mark.parametrize(
    ("config", "asked", "stays"),
    [
        (SimpleNamespace(option=SimpleNamespace()), True, True),
        (SimpleNamespace(option=SimpleNamespace(dist="no")), True, True),
        (SimpleNamespace(option=SimpleNamespace(dist="load")), True, False),
        (SimpleNamespace(option=SimpleNamespace(dist="no"), workerinput={}), True, False),
        (SimpleNamespace(option=SimpleNamespace(dist="load")), False, False),
    ],
    ids=["no-xdist", "one-process", "controller", "worker", "not-asked"],
)
def test_only_a_process_alone_knows_what_is_next(config: Any, asked: bool, stays: bool) -> None:
    settings = Settings({"overlap_start": asked, "launches": 2}, frozenset({"overlap_start"}))
    possible, problems = possible_here(config, settings)
    assert possible["overlap_start"] is stays
    assert possible["launches"] == 2
    assert bool(problems) is (asked and not stays)
