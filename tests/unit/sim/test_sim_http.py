"""The HTTP server against raw bytes: framing, keep-alive, pipelining, things that are not HTTP/1.1."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pytest_pdperf.engines.sim.http import MAX_BODY, Connection, Exchange

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("192.0.2.1", 5) if name == "peername" else default


class Server:
    """One connection with its handler's exchanges and its access log."""

    def __init__(self, handler: Callable[[Exchange], None] | None = None) -> None:
        self.seen: list[Exchange] = []
        self.log: list[tuple[str, str, str, str, int]] = []
        self._handler = handler or (lambda exchange: None)
        self.registry: set[Connection] = set()
        self.connection = Connection(self._handle, lambda *row: self.log.append(row), self.registry)
        self.wire = Wire()
        self.connection.connection_made(self.wire)

    def _handle(self, exchange: Exchange) -> None:
        self.seen.append(exchange)
        self._handler(exchange)

    def feed(self, data: bytes) -> None:
        self.connection.data_received(data)


def ok(exchange: Exchange) -> None:
    exchange.respond(200, b"fine", "text/plain")


def test_one_request_and_its_answer() -> None:
    server = Server(ok)
    server.feed(GET)
    head, body = server.wire.sent.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-length: 4" in head
    assert b"x-pdperf-simulated: 1" in head
    assert body == b"fine"
    assert not server.wire.closed
    assert server.log == [("192.0.2.1:5", "GET", "/health", "1.1", 200)]


def test_a_request_in_single_bytes() -> None:
    server = Server(ok)
    for byte in b"POST /a?b=c HTTP/1.1\r\nX-Request-Id: Ab\r\nContent-Length: 3\r\n\r\nxyz":
        server.feed(bytes([byte]))
    (exchange,) = server.seen
    assert (exchange.method, exchange.path, bytes(exchange.body)) == ("POST", "/a", b"xyz")
    assert exchange.headers["x-request-id"] == "Ab"


def test_keep_alive_and_close() -> None:
    server = Server(ok)
    server.feed(GET)
    server.feed(GET.replace(b"host", b"connection: close\r\nhost"))
    assert server.wire.sent.count(b"HTTP/1.1 200") == 2
    assert b"connection: close" in server.wire.sent
    assert server.wire.closed


def test_pipelined_requests_are_answered_one_after_the_other() -> None:
    server = Server()
    server.feed(GET + GET.replace(b"health", b"second"))
    assert [e.path for e in server.seen] == ["/health"]
    ok(server.seen[0])
    assert [e.path for e in server.seen] == ["/health", "/second"]
    ok(server.seen[1])
    assert server.wire.sent.count(b"fine") == 2


def test_a_stream_is_chunked_and_ends_properly() -> None:
    server = Server()
    server.feed(GET)
    (exchange,) = server.seen
    exchange.begin_stream()
    exchange.write(b"data: one\n\n")
    exchange.write(b"x" * 300)
    exchange.end()
    head, _, rest = server.wire.sent.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert b"content-type: text/event-stream; charset=utf-8" in head
    assert rest == b"b\r\ndata: one\n\n\r\n12c\r\n" + b"x" * 300 + b"\r\n0\r\n\r\n"
    assert exchange.closed
    exchange.write(b"tardy")
    assert b"tardy" not in server.wire.sent


def test_a_client_that_leaves_is_noticed_once_and_nothing_is_written_after() -> None:
    server = Server()
    server.feed(GET)
    (exchange,) = server.seen
    left: list[int] = []
    exchange.on_close = lambda: left.append(1)
    exchange.begin_stream()
    assert server.registry == {server.connection}
    server.connection.connection_lost(None)
    sent = server.wire.sent
    exchange.write(b"tardy")
    exchange.end()
    exchange.respond(200)
    assert server.wire.sent == sent
    assert left == [1]
    assert exchange.closed
    assert server.registry == set()


def test_leaving_after_the_answer_is_no_abort() -> None:
    server = Server()
    server.feed(GET)
    (exchange,) = server.seen
    left: list[int] = []
    exchange.on_close = lambda: left.append(1)
    ok(exchange)
    server.connection.connection_lost(None)
    assert left == []


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
    ],
    ids=["http2", "tls", "text", "header"],
)
def test_what_is_not_http_1_is_refused_and_closed(data: bytes) -> None:
    server = Server(ok)
    server.feed(data)
    assert server.seen == []
    assert server.wire.closed
    assert server.wire.sent.startswith(b"HTTP/1.1 400")
    server.feed(GET)
    assert server.seen == []


def test_a_body_without_bounds_is_refused() -> None:
    server = Server(ok)
    server.feed(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (MAX_BODY + 10))
    for _ in range(65):
        server.feed(b"x" * (1 << 20))
    assert server.wire.sent.startswith(b"HTTP/1.1 413")
    assert server.wire.closed
    assert server.seen == []


def test_expect_continue_is_answered() -> None:
    server = Server(ok)
    server.feed(b"POST / HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n")
    assert server.wire.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
    server.feed(b"x")
    assert b"HTTP/1.1 200" in server.wire.sent


def test_an_absolute_target_is_a_path() -> None:
    server = Server(ok)
    server.feed(b"GET http://host:1/health?x HTTP/1.1\r\nhost: x\r\n\r\n")
    assert server.seen[0].path == "/health"
