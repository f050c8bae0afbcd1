"""Carries connections of this machine to a port of a pod, each over one WebSocket to the API server.

kr8s opens the WebSocket. Its own `PortForward` listens on a port that it guesses, which another process may take first;
asks a pod that is gone without end or pause, while the client waits; and leaves connections open when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from pytest_pdperf.stack.secrets import mask

CHUNK = 65536
DATA, ERRORS = 0, 1
"""Channels: the first byte of a message. The first message of each names the port and carries nothing."""


async def listen(
    api: Any, namespace: str, pod: str, port: int, failed: Callable[[str], None]
) -> asyncio.Server:
    """Listen on a free loopback port until the server is closed; `api` is kr8s's.

    A connection that cannot be carried on is closed at once, and `failed` is told why.
    """

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            query = {"name": pod, "namespace": namespace, "ports": str(port)}
            async with api.open_websocket(
                url=f"pods/{pod}/portforward", namespace=namespace, params=query
            ) as socket:
                await _carry(socket, reader, writer)
        except Exception as problem:
            failed(mask(_reason(problem))[:200])
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    return await asyncio.start_server(connected, "127.0.0.1", 0)


def port_of(server: asyncio.Server) -> int:
    """Where it listens."""
    return int(server.sockets[0].getsockname()[1])


async def _carry(socket: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Both ways until one side ends."""
    ways = [asyncio.create_task(_up(socket, reader)), asyncio.create_task(_down(socket, writer))]
    try:
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
    for way in done:
        way.result()


async def _up(socket: Any, reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(CHUNK):
            await socket.send_bytes(bytes([DATA]) + data)


async def _down(socket: Any, writer: asyncio.StreamWriter) -> None:
    named = set()
    while True:
        try:
            message = await socket.receive_bytes()
        except Exception as end:
            if getattr(end, "code", None) in (1000, 1005):  # the usual ways to close a WebSocket
                return
            raise
        channel, data = message[0], message[1:]
        if channel not in named:
            named.add(channel)
        elif channel == ERRORS:
            raise ConnectionError(data.decode(errors="replace"))
        else:
            try:
                writer.write(data)
                await writer.drain()
            except ConnectionError:
                return


def _reason(problem: BaseException) -> str:
    """The first cause, which task groups wrap."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    status = getattr(getattr(problem, "response", None), "status_code", None)
    return f"HTTP {status}, no WebSocket" if status else f"{type(problem).__name__}: {problem}"
