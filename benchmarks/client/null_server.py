"""A server with nothing behind it: paced streams, and a stamp for every event it hands to the kernel.

`python -m benchmarks.client.null_server PORT_FILE TRUTH_FILE PACE` serves until SIGTERM, then writes for every request
its id, the kernel's receive stamp of the request, and the time before each event's send. One thread, one epoll loop.

PACE is JSON: `max_tokens` events, the first `ttft_ms` after the request's receipt, then one every `itl_ms`, on a fixed
schedule that does not drift. `phases` spreads that many streams evenly over a gap; with 1 all that began together
send together, as an engine's batch does. Every answer ends with usage, where it
is asked for, and `[DONE]`. A request that brings no id is
known by its number, which the first event's text says (` n17`): programs that keep texts can be matched by it.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import select
import signal
import socket
import struct
import sys
import time
from array import array
from pathlib import Path

SO_TIMESTAMPNS = 35
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'{"object":"list","data":[{"id":"paced","object":"model","max_model_len":1000000}]}'


def chunk(text: str) -> bytes:
    """One server-sent event as one HTTP chunk."""
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def token(finish: str, text: str = " tok") -> bytes:
    """An event of the size that engines send for one token."""
    return chunk(
        '{"id":"cmpl-0123456789abcdef","object":"text_completion","created":1790000000,"model":"paced","choices":'
        f'[{{"index":0,"text":"{text}","logprobs":null,"finish_reason":{finish},"stop_reason":null}}]}}'
    )


TOKEN, LAST = token("null"), token('"length"')


class Peer:
    """One client connection."""

    __slots__ = (
        "first",
        "left",
        "prompt",
        "raw",
        "received_ns",
        "request_id",
        "sock",
        "stamps",
        "step",
        "total",
        "usage",
        "when",
    )

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.raw = b""
        self.first = b""
        self.received_ns = 0
        self.request_id = ""
        self.usage = False
        self.prompt = self.total = self.left = 0
        self.step = self.when = 0.0
        self.stamps: array[int] = array("q")


class NullServer:
    """See the module."""

    def __init__(self, ttft_ms: float = 50.0, itl_ms: float = 20.0, phases: int = 1) -> None:
        self.ttft, self.step, self.phases = ttft_ms / 1e3, itl_ms / 1e3, phases
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.listener.setblocking(False)
        self.epoll = select.epoll()
        self.epoll.register(self.listener.fileno(), select.EPOLLIN)
        self.peers: dict[int, Peer] = {}
        self.due: list[tuple[float, int, Peer]] = []
        self.truth: dict[str, tuple[int, array[int]]] = {}
        self.running = True
        self.order = 0

    def run(self) -> None:
        """Serve until `running` is false."""
        while self.running:
            now = time.monotonic()
            while self.due and self.due[0][0] <= now:
                self.send(heapq.heappop(self.due)[2])
                now = time.monotonic()
            wait = self.due[0][0] - now if self.due else 0.2
            # epoll waits in whole milliseconds: sleep short of the due time, poll through the rest.
            for fd, _ in self.epoll.poll(0 if wait < 0.0015 else wait - 0.001):
                if fd == self.listener.fileno():
                    self.accept()
                else:
                    self.read(self.peers[fd])

    def accept(self) -> None:
        """Take every waiting connection."""
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self.listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
                self.peers[sock.fileno()] = Peer(sock)
                self.epoll.register(sock.fileno(), select.EPOLLIN)

    def read(self, peer: Peer) -> None:
        """Collect a request and schedule its answer."""
        try:
            data, ancillary, _, _ = peer.sock.recvmsg(1 << 20, 64)
        except OSError:
            data, ancillary = b"", []
        if not data:
            self.drop(peer)
            return
        if ancillary:
            seconds, nanos = struct.unpack("=qq", ancillary[0][2])
            peer.received_ns = seconds * 1_000_000_000 + nanos
        else:
            peer.received_ns = time.time_ns()
        peer.raw += data
        head, mark, body = peer.raw.partition(b"\r\n\r\n")
        if not mark:
            return
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
        }
        if len(body) < int(headers.get(b"content-length", 0)):
            return
        peer.raw = b""
        if head.startswith(b"POST /v1/completions "):
            self.start(peer, headers, json.loads(body))
        elif head.startswith(b"GET /health "):
            peer.sock.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        elif head.startswith(b"GET /v1/models "):
            answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            peer.sock.send(answer % (len(MODELS), MODELS))
        else:
            peer.sock.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    def start(self, peer: Peer, headers: dict[bytes, bytes], body: dict[str, object]) -> None:
        """Answer with a head now and events on schedule."""
        options = body.get("stream_options")
        peer.usage = isinstance(options, dict) and options.get("include_usage") is True
        number = len(self.truth)
        peer.request_id = headers.get(b"x-request-id", b"").decode() or f"n{number}"
        peer.first = token("null", f" n{number}")
        peer.total = peer.left = int(str(body["max_tokens"]))
        prompt = body["prompt"]
        peer.prompt = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
        peer.step = self.step
        ttft = self.ttft + self.step * (number % self.phases) / self.phases
        spent = (time.time_ns() - peer.received_ns) / 1e9
        peer.when = time.monotonic() - spent + ttft
        peer.stamps = array("q")
        self.truth[peer.request_id] = (peer.received_ns, peer.stamps)
        peer.sock.send(HEAD)
        self.schedule(peer)

    def schedule(self, peer: Peer) -> None:
        """Queue the peer's next event."""
        self.order += 1
        heapq.heappush(self.due, (peer.when, self.order, peer))

    def send(self, peer: Peer) -> None:
        """Hand one event to the kernel, stamped just before."""
        peer.left -= 1
        data = (TOKEN if peer.stamps else peer.first) if peer.left else LAST
        try:
            stamp = time.time_ns()
            peer.sock.send(data)
            peer.stamps.append(stamp)
            if peer.left:
                peer.when += peer.step
                self.schedule(peer)
                return
            total = peer.prompt + peer.total
            usage = (
                f'{{"prompt_tokens":{peer.prompt},"completion_tokens":{peer.total},"total_tokens":{total}}}'
            )
            end = chunk("[DONE]") + b"0\r\n\r\n"
            if peer.usage:
                end = chunk(f'{{"id":"cmpl-0","choices":[],"usage":{usage}}}') + end
            peer.sock.send(end)
        except OSError:
            self.drop(peer)

    def drop(self, peer: Peer) -> None:
        """Forget a connection."""
        fd = peer.sock.fileno()
        if fd >= 0:
            self.epoll.unregister(fd)
            self.peers.pop(fd, None)
            peer.sock.close()


def main(port_file: Path, truth_file: Path, pace: str) -> None:
    """Serve until SIGTERM, then write the truth."""
    import gc

    server = NullServer(**json.loads(pace))

    def stop(*_: object) -> None:
        server.running = False

    signal.signal(signal.SIGTERM, stop)
    port_file.with_suffix(".tmp").write_text(str(server.listener.getsockname()[1]))
    port_file.with_suffix(".tmp").rename(port_file)
    gc.disable()
    with contextlib.suppress(InterruptedError):
        server.run()
    rows = {name: [received, *stamps] for name, (received, stamps) in server.truth.items()}
    truth_file.write_text(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
