"""The runner on a clock that the test winds: model time decides, lateness shifts nothing, blocks come in order."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pytest_pdperf.engines.sim.link import KvLink
from pytest_pdperf.engines.sim.profile import FAST, Link
from pytest_pdperf.engines.sim.runner import Runner
from pytest_pdperf.engines.sim.scheduler import StepScheduler
from pytest_pdperf.engines.sim.sequence import Sequence, Step


@dataclass
class World:
    """A runner with hands on its clock and its alarm."""

    lag: float = 0.0
    kv_blocks: int = 100
    now: float = 100.0
    due: float | None = None
    seen: list[tuple[float, Step]] = field(default_factory=list)
    transfers: list[tuple[object, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = Runner(
            StepScheduler(FAST, kv_blocks=self.kv_blocks),
            KvLink(Link(1000.0)),
            clock=lambda: self.now,
            jitter=lambda: self.lag,
            on_step=lambda step: self.seen.append((self.now, step)),
            on_transfer=lambda key, end: self.transfers.append((key, end)),
        )
        self.runner.timer = self

    def set(self, when: float | None) -> None:
        self.due = when

    def close(self) -> None:
        self.due = None

    def ring(self, late: float = 0.0) -> None:
        """Let the alarm ring, possibly late."""
        assert self.due is not None
        self.now = max(self.now, self.due + late)
        self.due = None
        self.runner.wake()

    def run(self, late: float = 0.0) -> None:
        for _ in range(1000):
            if self.due is None:
                return
            self.ring(late)
        raise AssertionError("it never comes to rest")


def test_steps_are_seen_when_they_end_and_the_alarm_rests_afterwards() -> None:
    world = World()
    world.runner.submit(Sequence(16, 4), 100.5)
    assert world.due == 100.5
    world.run()
    assert [step.number for _, step in world.seen] == [0, 1, 2, 3]
    assert all(now == step.end_s for now, step in world.seen)
    assert world.due is None


def test_lag_delays_what_is_seen_and_no_step() -> None:
    plain, lagging = World(), World(lag=0.002)
    for world in (plain, lagging):
        world.runner.submit(Sequence(16, 4), 100.5)
        world.run()
    assert [s.end_s for _, s in lagging.seen] == [s.end_s for _, s in plain.seen]
    assert [now - s.end_s for now, s in lagging.seen] == pytest.approx([0.002] * 4)


def test_waking_for_something_else_shows_no_step_early() -> None:
    world = World(lag=0.002)
    world.runner.submit(Sequence(16, 2), 100.5)
    world.ring()
    end = world.runner.scheduler.next_time()
    assert end is not None
    world.now = end + 0.001
    world.runner.wake()
    assert world.seen == []
    assert world.due == pytest.approx(end + 0.002)
    world.ring()
    assert [step.end_s for _, step in world.seen] == [end]


def test_one_wake_up_a_step() -> None:
    world = World(lag=0.001)
    world.runner.submit(Sequence(16, 10), 100.5)
    world.ring()
    rings = 0
    while world.due is not None:
        world.ring()
        rings += 1
    assert rings == 10


def test_a_late_loop_catches_up_without_stretching_the_model() -> None:
    punctual, late = World(), World()
    for world, delay in ((punctual, 0.0), (late, 0.012)):
        world.runner.submit(Sequence(16, 20), 100.5)
        world.run(delay)
    assert [s.end_s for _, s in late.seen] == [s.end_s for _, s in punctual.seen]
    assert max(now - s.end_s for now, s in late.seen) <= 0.013
    assert len({now for now, _ in late.seen}) < 20, "several steps came out in one wake-up"


def test_transfers_end_on_the_links_clock() -> None:
    world = World()
    assert world.runner.start_transfer("a", 500) == 100.0
    world.now = 100.25
    assert world.runner.start_transfer("b", 250) == 100.25
    world.run(late=0.1)
    assert world.transfers == [("a", pytest.approx(100.75)), ("b", pytest.approx(100.75))]  # type: ignore[comparison-overlap]
    world.runner.start_transfer("c", 500)
    world.runner.cancel_transfer("c")
    assert world.due is None


def test_blocks_are_granted_in_order_as_they_come_free() -> None:
    world = World(kv_blocks=10)
    granted: list[str] = []
    first, second, third = (Sequence(100, 20, kv_ready=True) for _ in range(3))
    world.runner.reserve(first, lambda: granted.append("first"))
    world.runner.reserve(second, lambda: granted.append("second"))
    world.runner.reserve(third, lambda: granted.append("third"))
    assert (granted, world.runner.wanting) == (["first"], 2)
    world.runner.cancel(second)
    assert (granted, world.runner.wanting) == (["first"], 1)
    world.runner.submit(first, 100.0)
    world.run()
    assert (granted, world.runner.wanting) == (["first", "third"], 0)


def test_a_cancelled_sequence_is_never_seen_again() -> None:
    world = World()
    stays, goes = Sequence(16, 6), Sequence(16, 6)
    world.runner.submit(stays, 100.0)
    world.runner.submit(goes, 100.0)
    world.ring()
    world.ring()
    world.runner.cancel(goes)
    count = len(world.seen)
    world.run()
    assert len(world.seen) > count
    assert all(goes not in step.emitted for _, step in world.seen[count:])
