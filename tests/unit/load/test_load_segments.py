"""Counting segments against stamps: what is called lost, and what is only a server's breath."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from pytest_pdperf.load.segments import BATCH_NS, LATE_NS, LoopWatch, Segments, data_segments

MS = 1_000_000
TWO = b"data: a\n\ndata: b\n\n"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A sender without Nagle and its receiver, over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    yield sender, receiver
    sender.close()
    receiver.close()


def arrive(pair: tuple[socket.socket, socket.socket], segments: int) -> None:
    """Send so many segments and wait until the kernel has them."""
    sender, receiver = pair
    want = data_segments(receiver) + segments
    for _ in range(segments):
        sender.send(b"x")
    end = time.monotonic() + 10
    while data_segments(receiver) < want and time.monotonic() < end:
        time.sleep(0.001)
    assert data_segments(receiver) == want


def test_lost_is_what_arrived_without_a_stamp_of_its_own(pair: tuple[socket.socket, socket.socket]) -> None:
    counted = Segments(pair[1])
    arrive(pair, 5)
    counted.read_one(1, 10 * MS)
    assert counted.read_several(TWO, {30 * MS, 40 * MS}, 40 * MS, 41 * MS, True) == 2
    assert counted.read_several(TWO, {50 * MS}, 50 * MS, 51 * MS, True) == 0, "counted once"
    arrive(pair, 2)
    assert counted.read_several(TWO, {60 * MS}, 60 * MS, 61 * MS, True) == 1


@pytest.mark.parametrize(
    ("data", "last_ms", "late", "lost"),
    [
        (TWO, 40.0, True, 5),
        (TWO, 40.0, False, 0),
        (TWO, 10.9, True, 0),
        (TWO, 11.1, True, 5),
        (b"HTTP/1.1 200 OK\r\n\r\n" + TWO, 40.0, True, 4),
        (TWO + b"data: [DONE]\n\n", 40.0, True, 2),
    ],
)
def test_what_counts_as_lost(
    pair: tuple[socket.socket, socket.socket], data: bytes, last_ms: float, late: bool, lost: int
) -> None:
    """Only after a stall, only beyond a millisecond, and less an answer's quick first and last sends."""
    counted = Segments(pair[1])
    counted.restart(10 * MS)
    arrive(pair, 6)
    last = round(last_ms * MS)
    assert counted.read_several(data, {last}, last, last + MS, late) == lost


def test_a_large_read_may_be_many_segments(pair: tuple[socket.socket, socket.socket]) -> None:
    counted = Segments(pair[1])
    arrive(pair, 4)
    counted.read_one(5000, 10 * MS)
    arrive(pair, 1)
    assert counted.read_several(TWO, {40 * MS}, 40 * MS, 41 * MS, True) == 0


def test_one_segment_is_known_by_the_count_and_then_read(pair: tuple[socket.socket, socket.socket]) -> None:
    counted = Segments(pair[1])
    assert not counted.is_one(MS), "nothing has come"
    arrive(pair, 1)
    assert counted.is_one(2 * MS)
    assert not counted.is_one(3 * MS), "it is read"
    arrive(pair, 1)
    counted.read_one(1, 4 * MS)
    arrive(pair, 2)
    assert not counted.is_one(5 * MS)
    assert counted.read_several(TWO, {30 * MS}, 30 * MS, 31 * MS, True) == 1, "asking leaves the count alone"


def test_two_segments_are_never_called_one(pair: tuple[socket.socket, socket.socket]) -> None:
    """Where it is not certain how many were read, because several were read together or came in between."""
    for read in ("large", "several"):
        counted = Segments(pair[1])
        arrive(pair, 3)
        if read == "large":
            counted.read_one(5000, MS)
        else:
            counted.read_several(TWO, {30 * MS, 31 * MS}, 31 * MS, 32 * MS, True)
        arrive(pair, 1)
        assert not counted.is_one(40 * MS), "the third may still be there"
        counted.restart(50 * MS)
        arrive(pair, 1)
        assert counted.is_one(60 * MS), "an answer begins with nothing unread"


def test_watch_is_late_while_its_timer_is_and_for_a_batch_after() -> None:
    watch = LoopWatch()
    watch.tick(MS)
    assert not watch.late(MS + LATE_NS)
    assert watch.late(MS + LATE_NS + 1), "a long round: the timer has not had its turn"
    watch.tick(MS + LATE_NS)
    assert not watch.late(MS + LATE_NS)
    now = MS + 2 * LATE_NS + 1
    watch.tick(now)
    assert watch.late(now)
    for step in range(1, BATCH_NS // LATE_NS + 1):
        watch.tick(now + step * LATE_NS)
        assert watch.late(now + step * LATE_NS)
    watch.tick(now + BATCH_NS + 1)
    assert not watch.late(now + BATCH_NS + 1)
