"""Whether every segment's stamp was seen: the kernel counts segments, the reader counts stamps.

Where a late reader finds fewer stamps than segments, the kernel has merged some and the arrival of all but the last is
lost. Without this a stalled client would report merged events as a long gap followed by zeros and look punctual.
Segments that a server sends in one breath merge too, harmlessly, while the reader is awake; so only what is read after
the event loop was late counts, less the few quick sends that begin and end an answer.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Set

_DATA_SEGS_IN = 152
"""Offset of tcpi_data_segs_in in struct tcp_info (linux/tcp.h)."""
_U32 = struct.Struct("=I")
SMALL = 1400
"""Bytes that fit one segment anywhere; a larger read may be several segments with one event."""
HARMLESS_NS = 1_000_000
"""Segments that came within this much time of the read before are not called lost."""
LATE_NS = 8_000_000
"""A loop whose timer was not heard of for so long is late; it is due every `TICK_S`."""
TICK_S = 0.003
BATCH_NS = 25_000_000
"""How long after it wakes a late loop may still be working off what arrived meanwhile."""
HEAD_SENDS = 1
"""Quick sends before the first event of an answer: its head."""
TAIL_SENDS = 3
"""Quick sends after the last token of an answer: usage, end mark, last HTTP chunk."""


def data_segments(sock: socket.socket) -> int:
    """Segments with data that this socket has received, 0 when the kernel does not say."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _DATA_SEGS_IN + _U32.size)
    return int(_U32.unpack_from(info, _DATA_SEGS_IN)[0]) if len(info) >= _DATA_SEGS_IN + _U32.size else 0


class LoopWatch:
    """Knows whether the event loop is late or has just been: blocked, without CPU, or at a round that takes long.

    Only a timer ticks it. A read that ticked as well would hide rounds so long that a socket waits for its turn.
    """

    __slots__ = ("_last_ns", "_late_until_ns")

    def __init__(self) -> None:
        self._last_ns = 0
        self._late_until_ns = 0

    def tick(self, now: int) -> None:
        """The timer that is due every `TICK_S` runs at `now` (ns)."""
        if now - self._last_ns > LATE_NS:
            self._late_until_ns = now + BATCH_NS
        self._last_ns = now

    def late(self, now: int) -> bool:
        """Whether what is read at `now` may have waited through a stall."""
        return now <= self._late_until_ns or now - self._last_ns > LATE_NS


class Segments:
    """Bookkeeping of one connection."""

    __slots__ = ("_known", "_last_ns", "_read", "_reads", "_sock")

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.restart(0)

    def restart(self, now: int) -> None:
        """Begin anew: everything that has arrived so far is read."""
        self._recount(now)
        self._read = self._known
        """At least so many segments were read; fewer than in truth once a read held several of them."""

    def _recount(self, now: int) -> None:
        self._known = data_segments(self._sock)
        self._reads = 0
        self._last_ns = now

    def read_one(self, size: int, now: int) -> None:
        """A read that held at most one event."""
        self._read += 1
        if size > SMALL:
            self._recount(now)
        else:
            self._reads += 1
            self._last_ns = now

    def is_one(self, now: int) -> bool:
        """Whether what is unread is one segment for certain, so that it has one stamp; it counts as read then."""
        arrived = data_segments(self._sock)
        if arrived - self._read != 1:
            return False
        self._known, self._reads, self._read, self._last_ns = arrived, 0, arrived, now
        return True

    def read_several(self, data: bytes, stamps: Set[int], last: int, now: int, late: bool) -> int:
        """A read of several events: how many segments lost their own stamp by more than `HARMLESS_NS`."""
        arrived = data_segments(self._sock)
        lost = arrived - self._known - self._reads - len(stamps)
        worst = last - self._last_ns
        self._known, self._reads, self._last_ns = arrived, 0, now
        self._read += len(stamps)
        if data.startswith(b"HTTP/"):
            lost -= HEAD_SENDS
        if b"[DONE]" in data:
            lost -= TAIL_SENDS
        return lost if late and lost > 0 and worst > HARMLESS_NS else 0
