"""The KV link against arithmetic done by hand, and bytes conserved under any load."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_pdperf.engines.sim.link import KvLink
from pytest_pdperf.engines.sim.profile import Link


def same(ended: list[tuple[object, float]], expected: list[tuple[str, float]]) -> bool:
    """Equal keys in equal order, times up to rounding."""
    keys = [key for key, _ in ended] == [key for key, _ in expected]
    times = [end for _, end in ended] == pytest.approx([end for _, end in expected])
    return keys and bool(times)


def drain(link: KvLink) -> list[tuple[object, float]]:
    ended = []
    while (due := link.next_time()) is not None:
        ended += link.advance(due)
    return ended


def test_one_transfer_has_the_whole_link() -> None:
    link = KvLink(Link(100.0, congestion=0.5))
    link.start("a", 50, 2.0)
    assert link.next_time() == pytest.approx(2.5)
    assert link.advance(2.4) == []
    assert same(link.advance(3.0), [("a", 2.5)])
    assert link.next_time() is None


def test_two_share_equally_and_congestion_slows_both() -> None:
    link = KvLink(Link(100.0, congestion=0.25))
    link.start("a", 40, 0.0)
    link.start("b", 80, 0.0)
    # Together 100/1.25 = 80 B/s, 40 each: a ends at 1.0 with b half done; alone b has 100 B/s for its last 40.
    assert same(drain(link), [("a", 1.0), ("b", 1.4)])


def test_beyond_the_lanes_transfers_wait_in_order_but_count_as_congestion() -> None:
    link = KvLink(Link(90.0, congestion=0.1, lanes=2))
    for name in "abc":
        link.start(name, 30, 0.0)
    assert link.outstanding == 3
    # Three outstanding: 90/1.2 = 75 B/s in two lanes, 37.5 each: a and b end together at 0.8, c runs alone after.
    ended = drain(link)
    assert [key for key, _ in ended] == ["a", "b", "c"]
    assert [end for _, end in ended] == pytest.approx([0.8, 0.8, 0.8 + 30 / 90])


def test_half_the_bandwidth_takes_twice_as_long() -> None:
    link = KvLink(Link(100.0), factor=0.5)
    link.start("a", 50, 0.0)
    assert same(drain(link), [("a", 1.0)])


def test_a_cancelled_transfer_leaves_its_share_to_the_others() -> None:
    link = KvLink(Link(100.0, lanes=1))
    link.start("a", 100, 0.0)
    link.start("b", 100, 0.0)
    link.cancel("a", 0.5)
    assert same(drain(link), [("b", 1.5)])
    link.cancel("never", 2.0)


def test_the_same_transfer_twice_is_refused() -> None:
    link = KvLink(Link(100.0, lanes=1))
    link.start("a", 1, 0.0)
    link.start("b", 1, 0.0)
    for key in "ab":
        with pytest.raises(ValueError, match="already"):
            link.start(key, 1, 0.0)


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(1, 1e10)), min_size=1, max_size=20),
    st.integers(1, 4),
    st.floats(0, 0.2),
    st.floats(0, 1e6),
)
@settings(max_examples=150, deadline=None)
def test_every_transfer_ends_once_in_order_of_lanes_and_never_faster_than_alone(
    loads: list[tuple[float, float]], lanes: int, congestion: float, epoch: float
) -> None:
    """`epoch` is a clock that has run for days: rounding there must not stop the link."""
    rate = 1e9
    link = KvLink(Link(rate, congestion=congestion, lanes=lanes))
    ended: list[tuple[object, float]] = []
    begun = {}
    for i, (at, size) in enumerate(sorted(loads)):
        now = epoch + at
        ended += link.advance(now)
        link.start(i, size, now)
        begun[i] = (now, size)
    ended += drain(link)
    assert sorted(key for key, _ in ended) == sorted(begun)  # type: ignore[type-var]
    times = [end for _, end in ended]
    assert times == sorted(times)
    for key, end in ended:
        start, size = begun[key]  # type: ignore[index]
        assert end - start >= size / rate * (1 - 1e-6) - 1e-6
    busy = sum(size for _, size in begun.values()) / rate
    assert times[-1] - epoch >= busy * (1 - 1e-6) - 1e-6
