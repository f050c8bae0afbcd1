"""When the kernel received each piece of an answer: how to read so that every event keeps its own stamp.

Linux stamps each TCP segment (`SO_TIMESTAMPNS`), but a read reports only the stamp of the last segment it
touched. So a read first looks (`MSG_PEEK`): with at most one event waiting it takes everything, else it takes
event by event, each read ending at an event's last byte, and every event keeps its own segment's stamp.

What cannot be had: while nobody reads, the kernel may merge waiting segments, and a merged segment has the last
stamp. On loopback it does so once their sender has been acknowledged, that is for a reader more than the 40 ms
delayed-ACK timer late, or within the first 16 segments after a connection was idle (measured on Linux 6.18: 5
segments 3 ms apart, 15 ms late, all stamps kept; 20 ms apart, 100 ms late, the last four shared one). `segments`
counts what was lost that way. Hence `TCP_QUICKACK` is armed when a request is sent - it takes the 40 ms Nagle stall
out of response heads - and not on every read.
"""

from __future__ import annotations

import re
import socket
import struct
import time
from types import TracebackType
from typing import Self

SO_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)
ANCILLARY = socket.CMSG_SPACE(16)
EVENT_END = re.compile(rb"\n\n|\r\n\r\n|\r\r")
CHUNK_TRAILER = 16
"""More bytes than this after an event's end belong to the next one, not to the framing."""
_STAMP = struct.Struct("=qq")


def receive_stamp(ancillary: list[tuple[int, int, bytes]]) -> int:
    """Receive stamp in ns, 0 when the kernel sent none."""
    if ancillary:
        level, kind, data = ancillary[0]
        if kind == SO_TIMESTAMPNS and level == socket.SOL_SOCKET:
            stamp: tuple[int, int] = _STAMP.unpack(data)
            return stamp[0] * 1_000_000_000 + stamp[1]
    return 0


class Stamping:
    """Keeps the kernel stamping for the length of a block, from before the first byte that matters.

    The kernel turns stamping on, machine-wide, a moment after the first socket asks for it, and segments that arrive
    within that moment have none. So a connection to oneself asks first and waits for a stamp to come.
    """

    def __init__(self, *, patience_s: float = 1.0) -> None:
        self._patience_s = patience_s
        self._socks: tuple[socket.socket, ...] = ()
        self.works = False
        """Whether a stamp came."""

    def __enter__(self) -> Self:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sender = socket.create_connection(listener.getsockname())
            receiver, _ = listener.accept()
        self._socks = (sender, receiver)
        receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        end = time.monotonic() + self._patience_s
        while not self.works and time.monotonic() < end:
            sender.send(b"\0")
            self.works = receive_stamp(receiver.recvmsg(1, ANCILLARY)[1]) > 0
            if not self.works:
                time.sleep(0.001)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sock in self._socks:
            sock.close()


def may_span_events(data: bytes) -> bool:
    """Whether peeked bytes hold more than one event, or a response head and more: read those piece by piece."""
    cut = data.find(b"\n\n")
    if cut < 0:
        cut = data.find(b"\r\n\r\n")
    return 0 <= cut < len(data) - CHUNK_TRAILER or data.startswith(b"HTTP/")
