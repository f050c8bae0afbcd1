"""Open connections, ready before they are needed, so that no request pays for a handshake."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any

from .connection import Connection, Finish
from .exchange import End, Exchange
from .segments import LoopWatch
from .target import Target

STALE_S = 3.0
"""Idle time after which a connection is replaced: common servers close kept-alive ones after 5 s."""
CONNECT_S = 10.0
HUNG_UP_S = 1.0
"""A server that ends a connection so soon after an answer does not keep connections."""
OPENING_AT_ONCE = 64
PROBE_S = 2.0
"""For each address of a name that has several; before the clock starts."""

Ready = Callable[[Connection | None, str], None]


def resolve(target: Target) -> tuple[int, tuple[Any, ...]]:
    """Address family and address of the target, looked up once. Raises OSError.

    A name with several addresses (`localhost` has two) stands for the first that takes a connection.
    """
    found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    for family, _, _, _, address in found if len(found) > 1 else ():
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.settimeout(PROBE_S)
            probe.connect(address)
            return int(family), address
    family, _, _, _, address = found[0]
    return int(family), address


def tls_context(target: Target) -> ssl.SSLContext | None:
    """Client context for https, None for http."""
    return target.access.tls() if target.tls else None


class Pool:
    """Idle connections of one target, last in first out, so a closed-loop client keeps its own."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        target: Target,
        finish: Finish,
        clock: Callable[[], int],
        loop_lag_ns: Callable[[], int] = int,
        watch: LoopWatch | None = None,
    ) -> None:
        self._loop = loop
        self._target = target
        self._finish = finish
        self._clock = clock
        self._loop_lag_ns = loop_lag_ns
        self._watch = watch
        self._tls = tls_context(target)
        self._address: tuple[int, tuple[Any, ...]] | None = None
        self._idle: list[Connection] = []
        self._opening: dict[Connection, float] = {}
        self._all: set[Connection] = set()
        self.spare = 0
        """Idle connections to hold ready."""
        self.reuses = target.keep_alive
        """Whether connections carry more than one request. A server that was seen to hang up after one, without saying
        so, gets a fresh one for each from then on.
        """

    def acquire(self, ready: Ready) -> None:
        """Call `ready` with an idle connection - at once when there is one - or with None and the reason."""
        while self._idle:
            connection = self._idle.pop()
            if connection.still_open():
                ready(connection, "")
                return
            if connection.used and self._loop.time() - connection.idle_since < HUNG_UP_S:
                self.reuses = False
            connection.close()
            self._all.discard(connection)
        self._open(ready)

    def release(self, connection: Connection, exchange: Exchange) -> None:
        """Take a connection back after its exchange; one that is not reusable is replaced if spares are
        short.
        """
        if exchange.reused and exchange.status is None and exchange.end in (End.EOF, End.RESET):
            self.reuses = False
        if connection.idle and self.reuses:
            self._idle.append(connection)
        else:
            connection.close()
            self._all.discard(connection)
        self._refill()

    def prepare(self, count: int, done: Callable[[], None]) -> None:
        """Open `count` connections, some at a time; `done` is called when every attempt has ended."""
        left = count
        running = 0

        def start() -> None:
            nonlocal left, running
            while left and running < OPENING_AT_ONCE:
                left -= 1
                running += 1
                self._open(opened)

        def opened(connection: Connection | None, error: str) -> None:
            nonlocal left, running
            running -= 1
            if connection is not None:
                self._idle.append(connection)
            else:
                left = 0
            if left:
                self._loop.call_soon(start)
            elif not running:
                self._loop.call_soon(done)

        if count:
            start()
        else:
            self._loop.call_soon(done)

    def sweep(self, now: float) -> None:
        """Replace stale connections and give up hanging attempts; call it a few times a second."""
        fresh = []
        for connection in self._idle:
            if connection.idle and now - connection.idle_since < STALE_S:
                fresh.append(connection)
            else:
                connection.close()
                self._all.discard(connection)
        self._idle = fresh
        for connection, since in list(self._opening.items()):
            if now - since > CONNECT_S:
                connection.abort_open(f"no connection within {CONNECT_S:g} s")
        self._refill()

    def close(self) -> None:
        """Close every connection."""
        self.spare = 0
        for connection in self._all:
            connection.close()
        self._all.clear()
        self._idle.clear()
        self._opening.clear()

    def _refill(self) -> None:
        missing = self.spare - len(self._idle) - len(self._opening)
        for _ in range(min(missing, OPENING_AT_ONCE)):
            self._open(self._keep)

    def _keep(self, connection: Connection | None, error: str) -> None:
        if connection is not None:
            self._idle.insert(0, connection)

    def _open(self, ready: Ready) -> None:
        try:
            if self._address is None:
                self._address = resolve(self._target)
            connection = Connection(
                self._loop,
                self._address,
                self._finish,
                tls=self._tls,
                hostname=self._target.host,
                quick_ack=self._target.quick_ack,
                clock=self._clock,
                loop_lag_ns=self._loop_lag_ns,
                watch=self._watch,
            )
            self._opening[connection] = self._loop.time()
            self._all.add(connection)
            connection.connect(lambda c, error: self._opened(c, error, ready))
        except OSError as problem:
            message = str(problem)
            self._loop.call_soon(lambda: ready(None, message))

    def _opened(self, connection: Connection, error: str, ready: Ready) -> None:
        self._opening.pop(connection, None)
        if error:
            self._all.discard(connection)
        ready(None if error else connection, error)
