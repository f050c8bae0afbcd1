"""Both alarms keep the same promise, and the kernel's is not on a grid of milliseconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from pytest_pdperf.engines.sim.timer import KernelTimer, LoopTimer, Timer, make_timer

Maker = Callable[[asyncio.AbstractEventLoop, Callable[[], None]], Timer]


async def rings(make: Maker, use: Callable[[Timer], None], wait_s: float = 0.15) -> list[float]:
    """Times at which the alarm rang while `use` was in effect."""
    rung: list[float] = []
    timer = make(asyncio.get_running_loop(), lambda: rung.append(time.monotonic()))
    try:
        use(timer)
        await asyncio.sleep(wait_s)
    finally:
        timer.close()
    return rung


@pytest.mark.parametrize("make", [KernelTimer, LoopTimer])
def test_it_rings_once_and_never_early(make: Maker) -> None:
    due = time.monotonic() + 0.05
    (rung,) = asyncio.run(rings(make, lambda timer: timer.set(due)))
    assert rung >= due - 1e-6


@pytest.mark.parametrize("make", [KernelTimer, LoopTimer])
def test_the_last_setting_counts(make: Maker) -> None:
    start = time.monotonic()

    def use(timer: Timer) -> None:
        timer.set(start + 0.01)
        timer.set(start + 60)

    assert asyncio.run(rings(make, use)) == []

    def off(timer: Timer) -> None:
        timer.set(time.monotonic() + 0.01)
        timer.set(None)

    assert asyncio.run(rings(make, off)) == []


@pytest.mark.parametrize("make", [KernelTimer, LoopTimer])
def test_a_moment_in_the_past_rings_at_once(make: Maker) -> None:
    assert len(asyncio.run(rings(make, lambda timer: timer.set(time.monotonic() - 5)))) == 1
    assert len(asyncio.run(rings(make, lambda timer: timer.set(0.0)))) == 1


def test_it_can_be_set_again_from_its_own_ring() -> None:
    async def run() -> int:
        count = 0

        def ring() -> None:
            nonlocal count
            count += 1
            if count < 5:
                timer.set(time.monotonic() + 0.001)

        timer = make_timer(asyncio.get_running_loop(), ring)
        timer.set(time.monotonic())
        for _ in range(200):
            await asyncio.sleep(0.01)
            if count == 5:
                break
        timer.close()
        return count

    assert asyncio.run(run()) == 5
