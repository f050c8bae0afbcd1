"""How late the event loop is, where the kernel cannot say: under TLS no plaintext byte has a receive stamp.

A datagram sent to oneself is stamped by the kernel on arrival, so the delay until the loop reads it is what
any event arriving then would have met.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from .stamps import ANCILLARY, SO_TIMESTAMPNS, receive_stamp

PERIOD_S = 0.005


class LoopProbe:
    """Pings the loop while it runs; `lag_ns` is the delay of the latest ping to come back."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        clock: Callable[[], int] = time.time_ns,
        period_s: float = PERIOD_S,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._period_s = period_s
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.setblocking(False)
        self._sock.bind(("127.0.0.1", 0))
        self._sock.connect(self._sock.getsockname())
        self._sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._timer: asyncio.TimerHandle | None = None
        self.lag_ns = 0
        self.pings = 0
        loop.add_reader(self._sock.fileno(), self._back)
        self._ping()

    def _ping(self) -> None:
        self._sock.send(b"\0")
        self._timer = None

    def _back(self) -> None:
        _, ancillary, _, _ = self._sock.recvmsg(16, ANCILLARY)
        stamp = receive_stamp(ancillary)
        if stamp:
            self.lag_ns = max(0, self._clock() - stamp)
            self.pings += 1
        self._timer = self._loop.call_later(self._period_s, self._ping)

    def close(self) -> None:
        """Stop pinging."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
