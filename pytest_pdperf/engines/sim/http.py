"""HTTP/1.1 for token streams: httptools on a bare transport, so that an event costs one write and no task switch."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

MAX_BODY = 64 << 20
JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"

_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class AccessLog(Protocol):
    """Told about every answer when its status is known."""

    def __call__(self, peer: str, method: str, path: str, version: str, status: int) -> None: ...


class Exchange:
    """One request and the means to answer it: in one piece, or as a stream of chunks."""

    __slots__ = (
        "_connection",
        "answered",
        "body",
        "closed",
        "headers",
        "keep_alive",
        "method",
        "on_close",
        "path",
        "target",
        "version",
    )

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.method = ""
        self.target = b""
        self.path = ""
        self.version = "1.1"
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.keep_alive = True
        self.answered = False
        self.closed = False
        """True once the answer is complete or the client has gone."""
        self.on_close: Callable[[], None] | None = None
        """Called when the client leaves before the answer is complete."""

    def respond(self, status: int, body: bytes = b"", content_type: str = JSON) -> None:
        """Send a whole answer; nothing happens when the client has gone."""
        if self.closed or self.answered:
            return
        self._head(status, content_type, f"content-length: {len(body)}\r\n", body)
        self._finish()

    def begin_stream(self, status: int = 200, content_type: str = EVENT_STREAM) -> None:
        """Send the head of a chunked answer at once."""
        if not self.closed and not self.answered:
            self._head(status, content_type, "transfer-encoding: chunked\r\n", b"")

    def write(self, data: bytes) -> None:
        """Send one chunk."""
        if not self.closed:
            self._connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        """Close a chunked answer properly."""
        if not self.closed:
            self._connection.transport.write(b"0\r\n\r\n")
            self._finish()

    def _head(self, status: int, content_type: str, framing: str, body: bytes) -> None:
        self.answered = True
        connection = self._connection
        close = "" if self.keep_alive else "connection: close\r\n"
        head = (
            f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n"
            f"date: {formatdate(usegmt=True)}\r\n"
            f"server: pdperf-sim\r\n"
            f"x-pdperf-simulated: 1\r\n"
            f"content-type: {content_type}\r\n"
            f"{framing}{close}\r\n"
        )
        connection.transport.write(head.encode("latin-1") + body)
        connection.access_log(connection.peer, self.method, self.path, self.version, status)

    def _finish(self) -> None:
        self.closed = True
        self.on_close = None
        self._connection.finished(self)


Handler = Callable[[Exchange], None]


class Connection(asyncio.Protocol):
    """One client connection: parses requests, hands them on one at a time, notices when the client leaves."""

    def __init__(self, handler: Handler, access_log: AccessLog, registry: set[Connection]) -> None:
        self._handler = handler
        self._registry = registry
        self.access_log = access_log
        self.transport: asyncio.Transport
        self.peer = "-"
        self._parser: httptools.HttpRequestParser
        self._reading: Exchange | None = None
        self._serving: Exchange | None = None
        self._queue: deque[Exchange] = deque()
        self._broken = False

    # -- transport side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up a parser; uvloop and asyncio both set TCP_NODELAY."""
        self.transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "-"
        self._parser = httptools.HttpRequestParser(self)
        self._registry.add(self)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; what is not HTTP/1.1 (an HTTP/2 preface, say) is refused and closed."""
        if self._broken:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError:
            self._refuse(400)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever is still answering."""
        self._registry.discard(self)
        self._broken = True
        serving, self._serving = self._serving, None
        self._queue.clear()
        if serving is not None:
            serving.closed = True
            if serving.on_close is not None:
                callback, serving.on_close = serving.on_close, None
                callback()

    # -- parser side

    def on_message_begin(self) -> None:
        """Start a new request."""
        self._reading = Exchange(self)

    def on_url(self, url: bytes) -> None:
        """Collect the request target."""
        if self._reading is not None:
            self._reading.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep headers by lower-case name; the last one wins."""
        if self._reading is not None:
            self._reading.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Answer `Expect: 100-continue`."""
        if self._reading is not None and "100-continue" in self._reading.headers.get("expect", "").lower():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Collect the body up to a bound."""
        if self._reading is not None:
            self._reading.body += body
            if len(self._reading.body) > MAX_BODY:
                self._refuse(413)

    def on_message_complete(self) -> None:
        """Hand the request on, or keep it until the one before it is answered."""
        exchange, self._reading = self._reading, None
        if exchange is None or self._broken:
            return
        exchange.method = self._parser.get_method().decode("latin-1")
        exchange.version = self._parser.get_http_version()
        exchange.keep_alive = self._parser.should_keep_alive()
        exchange.path = _path(exchange.target)
        self._queue.append(exchange)
        self._next()

    # -- exchange side

    def finished(self, exchange: Exchange) -> None:
        """An answer is complete: close, or go on with the next request."""
        self._serving = None
        if not exchange.keep_alive:
            self._broken = True
            self.transport.close()
        elif self._queue:
            self._next()

    def abort(self) -> None:
        """Drop the connection without a word."""
        self.transport.abort()

    def _next(self) -> None:
        if self._serving is None and self._queue:
            self._serving = self._queue.popleft()
            self._handler(self._serving)

    def _refuse(self, status: int) -> None:
        self._broken = True
        phrase = _PHRASES[status]
        self.transport.write(
            f"HTTP/1.1 {status} {phrase}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()
        )
        self.transport.close()


def _path(target: bytes) -> str:
    text = target.decode("latin-1")
    if re.match(r"https?://", text):
        return urlsplit(text).path or "/"
    return text.partition("?")[0]
