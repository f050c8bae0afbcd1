"""Where the client's CPU time goes, part by part: `python -m benchmarks.client.costs`.

Reading is timed on sockets whose data is there, so that no wake-up is in it; waking up on a bare epoll loop that does
nothing but read, so that nothing of the client is in it. On a busy machine that means little: several events wait.
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import socket
import statistics
import time
from collections.abc import Callable

import uvloop

from benchmarks.client.null_server import HEAD, TOKEN, chunk
from pytest_pdperf.load.connection import READ_BYTES, Connection
from pytest_pdperf.load.exchange import Exchange
from pytest_pdperf.load.segments import TICK_S, LoopWatch
from pytest_pdperf.load.stamps import ANCILLARY, SO_TIMESTAMPNS, Stamping

STREAMS = 64
ROUNDS = 300
ANSWERS = 30
EVENTS_PER_S = 3200
END = chunk(
    '{"id":"cmpl-0","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":9,"total_tokens":18}}'
)
END += chunk("[DONE]") + b"0\r\n\r\n"


def answers_us() -> dict[str, float]:
    """CPU us to look at, read, frame and note a part of an answer that has arrived: medians over rounds of 64."""
    loop = uvloop.new_event_loop()
    with Stamping(), socket.create_server(("127.0.0.1", 0), backlog=STREAMS) as listener:
        watch = LoopWatch()
        connections = [
            Connection(loop, (socket.AF_INET, listener.getsockname()), lambda *_: None, watch=watch)
            for _ in range(STREAMS)
        ]
        peers = []
        for connection in connections:
            connection.connect(lambda *_: None)
            peers.append(listener.accept()[0])
        loop.run_until_complete(asyncio.sleep(0.2))
        spent: dict[str, list[float]] = {"an event": [], "a head": [], "usage, [DONE], end": []}

        def arrived(name: str, data: bytes) -> None:
            for peer in peers:
                peer.send(data)
            before = time.process_time_ns()
            for connection in connections:
                connection._read()
            spent[name].append((time.process_time_ns() - before) / STREAMS / 1e3)

        for peer in peers:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ANSWERS):
            for connection, peer in zip(connections, peers, strict=True):
                connection.send(Exchange("s", 0, False, 1, 1, payload=b"POST / HTTP/1.1\r\n\r\n"))
                peer.recv(READ_BYTES)
            arrived("a head", HEAD)
            for _ in range(ROUNDS // ANSWERS):
                arrived("an event", TOKEN)
            arrived("usage, [DONE], end", END)
        for connection in connections:
            connection.close()
        for peer in peers:
            peer.close()
    loop.close()
    return {name: statistics.median(values) for name, values in spent.items()}


def system_calls_us() -> dict[str, float]:
    """CPU us of reading one event from Python, in three ways: medians of 3000."""
    buffer = bytearray(READ_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    with sender, receiver, Stamping():
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)

        def looked_at() -> None:
            data = receiver.recvmsg(READ_BYTES, ANCILLARY, socket.MSG_PEEK)[0]
            receiver.recv_into(buffer, len(data))

        ways: dict[str, Callable[[], object]] = {
            "recv": lambda: receiver.recv_into(buffer),
            "recv with its stamp": lambda: receiver.recvmsg(READ_BYTES, ANCILLARY),
            "the same, looked at first": looked_at,
        }
        return {name: _median_us(sender, way) for name, way in ways.items()}


def _median_us(sender: socket.socket, way: Callable[[], object]) -> float:
    spent = []
    for _ in range(3000):
        sender.send(TOKEN)
        before = time.process_time_ns()
        way()
        spent.append((time.process_time_ns() - before) / 1e3)
    return statistics.median(spent)


def timer_us(seconds: float = 3.0) -> float:
    """CPU us, an event at 3,200/s, of the timer that tells a late loop from an idle one."""
    loop = uvloop.new_event_loop()
    watch = LoopWatch()

    def tick() -> None:
        watch.tick(time.time_ns())
        loop.call_later(TICK_S, tick)

    tick()
    before = time.process_time_ns()
    loop.run_until_complete(asyncio.sleep(seconds))
    spent = (time.process_time_ns() - before) / 1e3
    loop.close()
    return spent / seconds / EVENTS_PER_S


def waking_us(seconds: float = 3.0) -> float:
    """CPU us of a bare epoll loop for one event, 3,200 of them a second spread evenly, from another process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = os.fork()
        if not sender:
            _send_evenly(listener.getsockname(), seconds)
            os._exit(0)
        peer, _ = listener.accept()
    with peer, select.epoll() as epoll:
        epoll.register(peer.fileno(), select.EPOLLIN)
        events, before = 0, time.process_time_ns()
        while True:
            epoll.poll()
            data = peer.recv(65536)
            if not data:
                break
            events += len(data) // len(TOKEN)
        spent = (time.process_time_ns() - before) / 1e3
    os.waitpid(sender, 0)
    return spent / max(1, events)


def _send_evenly(address: tuple[str, int], seconds: float) -> None:
    with socket.create_connection(address) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        due = time.monotonic()
        for _ in range(round(seconds * EVENTS_PER_S)):
            due += 1 / EVENTS_PER_S
            while time.monotonic() < due:
                pass
            sock.send(TOKEN)


def main() -> None:
    """Print them all."""
    gc.collect()
    gc.freeze()
    gc.disable()
    print(f"waking up for it alone  {waking_us():5.1f} us/event")
    for name, spent in answers_us().items():
        print(f"reading {name:18} {spent:3.1f} us")
    for name, spent in system_calls_us().items():
        print(f"  {name:25} {spent:5.1f} us")
    print(f"timer                   {timer_us():5.1f} us/event")


if __name__ == "__main__":
    main()
