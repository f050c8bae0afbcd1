"""One client connection: non-blocking, framed by httptools, driven by readiness callbacks.

In the timed path it does nothing but look how much is there, read it with its stamp (`stamps`), and let httptools find
the body. Nothing is decoded and nothing is logged.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Callable

import httptools

from .exchange import End, Exchange
from .liveness import peer_waits
from .os_errors import name_of, name_of_code
from .segments import LoopWatch, Segments
from .sse import says_done
from .stamps import ANCILLARY, EVENT_END, SO_TIMESTAMPNS, may_span_events, receive_stamp

TCP_QUICKACK = getattr(socket, "TCP_QUICKACK", 12)
READ_BYTES = 65536
EVENT_LIMIT = 8 << 20
"""Bytes without an end of event after which an answer is refused."""
BODY_LIMIT = 256 << 20
DONE_GRACE_S = 0.05
"""How long after `[DONE]` the end of the HTTP message is awaited before the connection is given up."""

Finish = Callable[["Connection", Exchange], None]


class Connection:
    """A kept-alive HTTP/1.1 connection, driven by readiness callbacks; holds at most one exchange.

    `finish` is called once per exchange, from the event loop, with the connection reusable iff `idle`.
    Without kernel stamps a read's own time stands in for them and `loop_lag_ns` says how late such a read may
    be.
    """

    __slots__ = (
        "_address", "_buffer", "_clock", "_done", "_exchange", "_fd", "_finish", "_grace", "_head", "_hostname",
        "_keep", "_loop", "_loop_lag_ns", "_more", "_on_open", "_out", "_parser", "_quick_ack", "_recv_into",
        "_recvmsg", "_segments", "_since_event", "_sock", "_tls", "_watch", "idle_since", "open", "used",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: tuple[int, tuple[object, ...]],
        finish: Finish,
        *,
        tls: ssl.SSLContext | None = None,
        hostname: str = "",
        quick_ack: bool = True,
        clock: Callable[[], int] = time.time_ns,
        loop_lag_ns: Callable[[], int] = int,
        watch: LoopWatch | None = None,
    ) -> None:
        self._loop = loop
        self._address = address
        self._finish = finish
        self._tls = tls
        self._hostname = hostname
        self._quick_ack = quick_ack
        self._clock = clock
        self._loop_lag_ns = loop_lag_ns
        self._watch = watch or LoopWatch()
        self._exchange: Exchange | None = None
        self._sock: socket.socket | ssl.SSLSocket | None = None
        self._fd = -1
        self._out: memoryview | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._on_open: Callable[[Connection, str], None] | None = None
        self.open = False
        self.used = False
        self.idle_since = 0.0

    @property
    def idle(self) -> bool:
        """Open and without an exchange."""
        return self.open and self._exchange is None

    def still_open(self) -> bool:
        """Idle, and not ended by the server in a way that the loop has yet to notice."""
        return self.idle and self._sock is not None and peer_waits(self._sock)

    # -- opening -----------------------------------------------------------------------------------

    def connect(self, on_open: Callable[[Connection, str], None]) -> None:
        """Open without blocking; `on_open(self, error)` is called once, with "" for success."""
        self.close()
        self._on_open = on_open
        family, address = self._address
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        except OSError:
            sock.close()
            raise
        self._sock = sock
        self._fd = sock.fileno()
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            self._opened(name_of_code(code))
        else:
            self._loop.add_writer(self._fd, self._connected)

    def _connected(self) -> None:
        assert self._sock is not None
        self._loop.remove_writer(self._fd)
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._opened(name_of_code(code))
        elif self._tls is None:
            self._opened("")
        else:
            self._sock = self._tls.wrap_socket(
                self._sock, server_hostname=self._hostname, do_handshake_on_connect=False
            )
            self._fd = self._sock.fileno()
            self._handshake()

    def _handshake(self) -> None:
        sock = self._sock
        assert isinstance(sock, ssl.SSLSocket)
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            self._loop.add_reader(self._fd, self._handshake)
        except ssl.SSLWantWriteError:
            self._loop.add_writer(self._fd, self._handshake)
        except (ssl.SSLError, OSError) as problem:
            self._opened(f"TLS: {problem}")
        else:
            self._opened("")

    def _opened(self, error: str) -> None:
        on_open, self._on_open = self._on_open, None
        if error:
            self.close()
        else:
            assert self._sock is not None
            self.open = True
            self.used = False
            self._recv_into = self._sock.recv_into
            self._recvmsg = self._sock.recvmsg
            self._buffer = bytearray(READ_BYTES)
            self._segments = Segments(self._sock)
            self.idle_since = self._loop.time()
            self._loop.add_reader(self._fd, self._read_tls if self._tls else self._read)
        if on_open is not None:
            on_open(self, error)

    def close(self) -> None:
        """Give the socket up; an exchange that is under way is not finished by this."""
        self.open = False
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        if self._sock is not None:
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._sock.close()
            self._sock = None
            self._fd = -1
        self._out = None

    def abort_open(self, error: str) -> None:
        """End an attempt to connect that takes too long."""
        if self._on_open is not None:
            self._opened(error)

    # -- sending -----------------------------------------------------------------------------------

    def send(self, exchange: Exchange) -> None:
        """Hand the exchange's payload to the kernel and await the answer. The stamp is taken just before."""
        sock = self._sock
        assert sock is not None and self.open and self._exchange is None
        self._exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        self._head: list[tuple[bytes, bytes]] = []
        self._since_event = 0
        self._done = False
        self._keep = False
        self._more = False
        exchange.reused = self.used
        self.used = True
        payload = exchange.payload
        self._segments.restart(self._clock())
        exchange.sent_ns = self._clock()
        try:
            sent = sock.send(payload)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            sent = 0
        except OSError as problem:
            self._over(End.RESET, f"sending failed: {name_of(problem)}")
            return
        if sent < len(payload):
            self._out = memoryview(payload)[sent:]
            self._loop.add_writer(self._fd, self._send_more)
        if self._quick_ack:
            sock.setsockopt(socket.IPPROTO_TCP, TCP_QUICKACK, 1)

    def _send_more(self) -> None:
        assert self._sock is not None and self._out is not None
        try:
            self._out = self._out[self._sock.send(self._out) :]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as problem:
            # An early answer may explain the refusal: read what is there before judging.
            self._loop.remove_writer(self._fd)
            self._out = None
            if self._exchange is not None and self._exchange.size == 0 and self._exchange.status is None:
                self._over(End.RESET, f"sending failed: {name_of(problem)}")
            return
        if not self._out:
            self._out = None
            self._loop.remove_writer(self._fd)

    # -- receiving ---------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            data, ancillary, _, _ = self._recvmsg(READ_BYTES, ANCILLARY, socket.MSG_PEEK)
            now = self._clock()
        except BlockingIOError:
            return
        except OSError as problem:
            self._lost(End.RESET, name_of(problem))
            return
        size = len(data)
        if not size:
            self._lost(End.EOF, "connection closed by the server")
            return
        stamp = receive_stamp(ancillary)
        if not may_span_events(data):
            self._segments.read_one(size, now)
        elif not self._segments.is_one(now):
            self._read_each(data, stamp, now)
            return
        self._recv_into(self._buffer, size)
        self._take(data, stamp, now)

    def _read_each(self, data: bytes, last: int, now: int) -> None:
        """Consume peeked data up to each event's end, so that each gets the stamp of its own last segment."""
        pieces = []
        start = 0
        for match in EVENT_END.finditer(data):
            end = match.end()
            piece, ancillary, _, _ = self._recvmsg(end - start, ANCILLARY)
            stamp = receive_stamp(ancillary)
            pieces.append((piece, stamp))
            start += len(piece)
            if stamp == last or start != end:
                break
        if start < len(data):
            self._recv_into(self._buffer, len(data) - start)
            pieces.append((data[start:], last))
        merged = self._segments.read_several(
            data, {stamp for _, stamp in pieces}, last, now, self._watch.late(now)
        )
        if self._exchange is not None:
            self._exchange.merged += merged
        for left, (piece, stamp) in enumerate(pieces, 1 - len(pieces)):
            self._more = left < 0
            if not self._take(piece, stamp, now):
                return

    def _read_tls(self) -> None:
        assert self._sock is not None
        while self.open:
            try:
                data = self._sock.recv(READ_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                return
            except OSError as problem:
                self._lost(End.RESET, name_of(problem))
                return
            if not data:
                self._lost(End.EOF, "connection closed by the server")
                return
            if not self._take(data, 0, self._clock()):
                return

    def _take(self, data: bytes, kernel_ns: int, now: int) -> bool:
        """Parse the framing of one read; False when the exchange is over."""
        exchange = self._exchange
        if exchange is None:
            self.close()
            return False
        if not kernel_ns:
            kernel_ns, now = now, now + self._loop_lag_ns()
            exchange.user_stamps = True
        before = exchange.size
        had_status = exchange.status
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as problem:
            self._more = True
            if not self._done:
                exchange.body.append(data)
                exchange.size += len(data)
                exchange.mark(kernel_ns, now)
                self._over(End.BAD_HTTP, f"not HTTP: {problem}", kernel_ns)
                return False
        if had_status is None and exchange.status is not None:
            exchange.head_ns = kernel_ns
        if exchange.size != before:
            exchange.mark(kernel_ns, now)
            if self._since_event > EVENT_LIMIT or exchange.size > BODY_LIMIT:
                limit = EVENT_LIMIT if self._since_event > EVENT_LIMIT else BODY_LIMIT
                what = "one event" if limit == EVENT_LIMIT else "one answer"
                self._over(End.TOO_LARGE, f"more than {limit >> 20} MiB in {what}", kernel_ns)
                return False
        if self._done:
            self._complete(exchange, kernel_ns)
            return False
        if self._grace is None and says_done(exchange.body):
            exchange.end_ns = kernel_ns
            self._grace = self._loop.call_later(DONE_GRACE_S, self._held_open)
        return True

    def _complete(self, exchange: Exchange, kernel_ns: int) -> None:
        keep = self._keep and self._out is None and not self._more
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        exchange.end = End.COMPLETE
        exchange.end_ns = kernel_ns
        self._exchange = None
        self.idle_since = self._loop.time()
        if not keep:
            self.close()
        self._finish(self, exchange)

    def _held_open(self) -> None:
        self._grace = None
        self._over(End.DONE, "", self._exchange.end_ns if self._exchange else 0)

    def _lost(self, end: End, why: str) -> None:
        """The peer closed or reset; ends the exchange if there is one."""
        if (exchange := self._exchange) is None:
            self.close()
            return
        if end is End.EOF and exchange.status is None:
            why = "connection closed before any answer"
        self._over(end, why)

    def expire(self, why: str) -> None:
        """The exchange is past its deadline."""
        self._over(End.TIMEOUT, why)

    def _over(self, end: End, why: str, when: int = 0) -> None:
        """End the exchange without a complete message; the connection is not reusable."""
        exchange = self._exchange
        self._exchange = None
        self.close()
        if exchange is not None:
            exchange.end = end
            exchange.error = why
            exchange.end_ns = when or self._clock()
            self._finish(self, exchange)

    # -- httptools callbacks -----------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        exchange = self._exchange
        if exchange is not None and status >= 200:
            exchange.status = status
            exchange.headers.update((n.decode("latin-1").lower(), v.decode("latin-1")) for n, v in self._head)
        self._head.clear()

    def on_body(self, body: bytes) -> None:
        exchange = self._exchange
        if exchange is not None:
            exchange.body.append(body)
            exchange.size += len(body)
            ends = body[-1] == 10 or body.find(b"\n") >= 0
            self._since_event = 0 if ends else self._since_event + len(body)

    def on_message_complete(self) -> None:
        if self._exchange is not None and self._exchange.status is not None:
            self._done = True
            self._keep = self._parser.should_keep_alive()
