"""The replay of a core that the host slows down: it says what no client could do, so it must not exaggerate."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.client.machine import Core, watch_core
from benchmarks.client.waiting import since, waited_s

US = 1e3


def core(*parts: tuple[float, float]) -> Core:
    """Slices of (ms of them, us each)."""
    return Core(np.concatenate([np.full(round(ms * 1e3 / us), us * US) for ms, us in parts]))


def test_an_undisturbed_core_is_late_only_when_it_cannot_keep_up() -> None:
    even = core((1000, 10))
    assert even.lost == 0
    assert even.slowest == pytest.approx(1)
    assert even.lag_ms(20_000, 25).max() == pytest.approx(0, abs=1e-9)
    overloaded = even.lag_ms(20_000, 100)
    assert overloaded[-1] == pytest.approx(500, rel=0.01), (
        "half of what has come is read when the second is over"
    )
    assert even.allows_us(20_000, 5) == 30, "the highest step"


def test_a_stall_is_worked_off_at_what_the_reader_has_to_spare() -> None:
    """100 ms at a tenth of the speed, 20,000 events/s of 25 us each: of 2000 events 400 are read, 1600 wait.

    The 400th came after 20 ms and is read at the stall's end, the last of the 1600 is read 40 ms after it came, and the
    queue, to which half of that work is added again, is gone after 80 ms.
    """
    found = core((500, 10), (100, 100), (400, 10))
    assert found.lost == pytest.approx(0.09, abs=0.001)
    assert found.slowest == pytest.approx(10, rel=0.01)
    lag = found.lag_ms(20_000, 25)
    assert lag.max() == pytest.approx(80, rel=0.01)
    assert lag[round(0.52 * 20_000)] == pytest.approx(80, rel=0.01)
    assert lag[round(0.6 * 20_000)] == pytest.approx(40, rel=0.01)
    late = np.flatnonzero(lag > 0.05) / 20_000
    assert late.min() == pytest.approx(0.5, abs=0.001)
    assert late.max() == pytest.approx(0.6 + 0.08, abs=0.002)


def test_what_a_core_allows_is_where_the_percentile_crosses() -> None:
    found = core((500, 10), (100, 100), (400, 10))
    most = found.allows_us(20_000, 5)
    assert most is not None
    assert np.percentile(found.lag_ms(20_000, most), 99) < 5
    assert np.percentile(found.lag_ms(20_000, most + 0.5), 99) >= 5
    assert core((100, 10), (900, 10_000)).allows_us(20_000, 5) is None
    assert "no reader at all keeps lag p99 below 5 ms at 20,000" in core((100, 10), (900, 10_000)).line(
        20_000, 5
    )
    assert f"at most {most:g} us an event" in found.line(20_000, 5)


def test_watching_counts_and_gives_the_core_back() -> None:
    before = os.sched_getaffinity(0)
    clock = iter(range(0, 10_000_000, 1000))
    found = watch_core(min(before), 0.001, lambda: next(clock))
    assert found.slices_ns.tolist() == [1000.0] * 1000
    assert os.sched_getaffinity(0) == before


def test_what_other_processes_took_is_said_where_the_kernel_knows(tmp_path: Path) -> None:
    stat = tmp_path / "schedstat"
    stat.write_text("700000000 250000000 12\n")
    assert waited_s(stat) == 0.25
    assert waited_s(tmp_path / "none") is None
    assert since(None) is None
    half = Core(core((500, 10), (500, 20)).slices_ns, 0.25)
    assert "of 1 s (25.0% to other processes here)" in half.line(20_000, 5)
    assert "other processes" not in core((500, 10)).line(20_000, 5)
