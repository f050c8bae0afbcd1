"""A server that sends what a script says and writes down when it did: the truth that the client is held against."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\nConnection: keep-alive\r\n\r\n"
)
RST = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Segment:
    """One send. `delay_ms` counts from the send before it (the first from the request)."""

    delay_ms: float
    data: bytes


@dataclass(frozen=True, slots=True)
class Script:
    """The answer to one request."""

    segments: Sequence[Segment] = ()
    head: bytes | None = HEAD
    """None sends no response head: segments are raw bytes."""
    chunked: bool = True
    final_chunk: bool = True
    """Whether the HTTP message is properly ended."""
    end_delay_ms: float = 0.0
    end: str = "keep"
    """`keep` the connection, `close` it, `reset` it, or `hold` it open in silence."""
    read_request: bool = True


@dataclass(slots=True)
class Served:
    """What became of one request: brackets of ns around each segment's send, the final chunk and the close."""

    request: bytes = b""
    seen_ns: int = 0
    sends: list[tuple[int, int]] = field(default_factory=list)


class ScriptedServer:
    """Answers the n-th request with the n-th script (the last one repeats). One thread a connection."""

    def __init__(
        self, scripts: Sequence[Script], *, nodelay: bool = True, tls: ssl.SSLContext | None = None
    ) -> None:
        self._scripts = scripts
        self._nodelay = nodelay
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._stop = threading.Event()
        self.served: list[Served] = []
        self.connections = 0
        self.in_flight = 0
        self.peak = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        """Base URL."""
        host, port = self._listener.getsockname()
        return f"{'https' if self._tls else 'http'}://{host}:{port}"

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.add(sock)
        try:
            if self._nodelay:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls:
                sock = self._tls.wrap_socket(sock, server_side=True)
                with self._lock:
                    self._open.add(sock)
            while self._one(sock):
                pass
        except OSError:
            pass
        finally:
            with contextlib.suppress(OSError):
                sock.close()
            with self._lock:
                self._open.discard(sock)

    def _one(self, sock: socket.socket) -> bool:
        """Serve one request; False when the connection is over."""
        with self._lock:
            script = self._scripts[min(len(self.served), len(self._scripts) - 1)]
        served = Served()
        if script.read_request:
            request = _read_request(sock)
            if request is None:
                return False
            served.request = request
        served.seen_ns = time.time_ns()
        with self._lock:
            script = self._scripts[min(len(self.served), len(self._scripts) - 1)]
            self.served.append(served)
            self.in_flight += 1
            self.peak = max(self.peak, self.in_flight)
        try:
            return self._play(sock, script, served)
        finally:
            with self._lock:
                self.in_flight -= 1

    def _play(self, sock: socket.socket, script: Script, served: Served) -> bool:
        start = time.monotonic()
        due = 0.0
        head_sent = script.head is None
        for segment in script.segments:
            due += segment.delay_ms / 1e3
            if not head_sent and segment.delay_ms >= 5:
                sock.sendall(script.head or b"")
                head_sent = True
            self._wait(start + due)
            data = _chunk(segment.data) if script.chunked else segment.data
            if not head_sent:
                sock.sendall(script.head or b"")
                head_sent = True
            before = time.time_ns()
            sock.sendall(data)
            served.sends.append((before, time.time_ns()))
        if not head_sent:
            sock.sendall(script.head or b"")
        self._wait(start + due + script.end_delay_ms / 1e3)
        if script.chunked and script.final_chunk and script.head is not None and script.end != "reset":
            before = time.time_ns()
            sock.sendall(b"0\r\n\r\n")
            served.sends.append((before, time.time_ns()))
        if script.end == "hold":
            self._stop.wait()
        if script.end == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        if script.end == "close":
            before = time.time_ns()
            sock.shutdown(socket.SHUT_WR)
            served.sends.append((before, time.time_ns()))
        return script.end == "keep"

    def _wait(self, until: float) -> None:
        while not self._stop.is_set():
            left = until - time.monotonic()
            if left <= 0:
                return
            self._stop.wait(left)
        raise OSError("stopped")

    def close(self) -> None:
        """Close everything and wait for every thread."""
        self._stop.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data) if data else b""


def _read_request(sock: socket.socket) -> bytes | None:
    """Head and body of a POST, None at the end of the connection."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        part = sock.recv(65536)
        if not part:
            return None
        raw += part
    head, _, body = raw.partition(b"\r\n\r\n")
    size = next(
        (
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length:")
        ),
        0,
    )
    while len(body) < size:
        part = sock.recv(65536)
        if not part:
            return None
        body += part
    return head + b"\r\n\r\n" + body


@contextlib.contextmanager
def scripted(
    scripts: Sequence[Script], *, nodelay: bool = True, tls: ssl.SSLContext | None = None
) -> Iterator[ScriptedServer]:
    """A scripted server for the length of a block."""
    server = ScriptedServer(scripts, nodelay=nodelay, tls=tls)
    try:
        yield server
    finally:
        server.close()
