"""The wire between a decode engine and a prefill engine: handshake, KV pull, release. JSON lines over TCP.

It stands where NIXL's side channel and its transfers stand; what crosses is 16 bytes that stand for the KV cache,
together with the moments at which the prefill engine's link model began and ended the copy. Both sides read
CLOCK_MONOTONIC of one machine, so those moments need no translation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import cast

import orjson

Message = Mapping[str, object]
Reply = Callable[[Message], None]


class KvLoadError(Exception):
    """KV could not be fetched; `peer_lost` tells a dead engine from a refused request."""

    def __init__(self, reason: str, *, peer_lost: bool) -> None:
        super().__init__(reason)
        self.peer_lost = peer_lost


@dataclass(frozen=True, slots=True)
class Pulled:
    """KV that has arrived: whose it is, how much, and when the copy began and ended (time.monotonic)."""

    digest: bytes
    tokens: int
    size: int
    began_s: float
    ended_s: float


class _Lines(asyncio.Protocol):
    """Cuts a byte stream into JSON lines."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                message = orjson.loads(line)
            except orjson.JSONDecodeError:
                message = None
            if not isinstance(message, dict):
                self.transport.abort()
                return
            self.received(message)

    def received(self, message: Message) -> None:
        raise NotImplementedError

    def send(self, message: Message) -> None:
        if not self.transport.is_closing():
            self.transport.write(orjson.dumps(message) + b"\n")


class SideChannelServer(_Lines):
    """Prefill's end of one connection: every line is answered, in any order, under the line's own `id`."""

    def __init__(self, handler: Callable[[Message, Reply], None]) -> None:
        super().__init__()
        self._handler = handler

    def received(self, message: Message) -> None:
        """Hand one request on together with the way to answer it."""
        number = message.get("id")
        self._handler(message, lambda answer: self.send({"id": number, **answer}))


class _Peer(_Lines):
    """Decode's end of one connection."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = count(1)
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self.lost = False

    def received(self, message: Message) -> None:
        number = message.get("id")
        future = self._pending.pop(number, None) if isinstance(number, int) else None
        if future is not None and not future.done():
            future.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        for future in self._pending.values():
            if not future.done():
                future.set_exception(KvLoadError("the prefill engine has gone", peer_lost=True))
        self._pending.clear()

    async def ask(self, message: Message) -> Message:
        if self.lost:
            raise KvLoadError("the prefill engine has gone", peer_lost=True)
        number = next(self._numbers)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        self.send({"id": number, **message})
        return await future


class PrefillPeers:
    """The prefill engines that a decode engine has shaken hands with, by engine id.

    The address in a request matters only the first time: a known engine is asked over the connection there is, and
    once that is lost its KV is lost too.
    """

    def __init__(
        self,
        *,
        handshake_s: float,
        timeout_s: float,
        clock: Callable[[], float],
        on_handshake: Callable[[str], None],
        named_by_address: bool = False,
    ) -> None:
        """`named_by_address`: an engine that starts anew has the id of the one before, as with SGLang, whose decode
        drops what it knows of a prefill engine that has gone. vLLM draws an id at every start.
        """
        self._handshake_s = handshake_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_handshake = on_handshake
        self._named_by_address = named_by_address
        self._known: dict[str, _Peer] = {}
        self._shaking: dict[str, asyncio.Task[_Peer]] = {}

    async def pull(self, engine_id: str, host: str, port: int, request_id: str) -> Pulled:
        """Fetch the KV of a request; returns when the copy is through. Raises KvLoadError."""
        peer = await self._peer(engine_id, host, port)
        answer = await peer.ask({"op": "pull", "engine_id": engine_id, "request_id": request_id})
        if answer.get("ok") is not True:
            raise KvLoadError(str(answer.get("error", "refused")), peer_lost=False)
        try:
            return Pulled(
                digest=bytes.fromhex(str(answer["digest"])),
                tokens=_number(answer, "tokens"),
                size=_number(answer, "size"),
                began_s=float(cast(float, answer["began_s"])),
                ended_s=float(cast(float, answer["ended_s"])),
            )
        except (KeyError, ValueError, TypeError) as problem:
            raise KvLoadError(f"malformed answer: {problem!r}", peer_lost=False) from None

    async def release(self, engine_id: str, host: str, port: int, request_id: str) -> None:
        """Tell the prefill engine that its blocks are no longer needed. Raises KvLoadError."""
        peer = await self._peer(engine_id, host, port)
        await peer.ask({"op": "release", "engine_id": engine_id, "request_id": request_id})

    async def _peer(self, engine_id: str, host: str, port: int) -> _Peer:
        known = self._known.get(engine_id)
        if known is not None and not (known.lost and self._named_by_address):
            return known
        task = self._shaking.get(engine_id)
        if task is None:
            task = asyncio.ensure_future(self._shake(engine_id, host, port))
            self._shaking[engine_id] = task
            task.add_done_callback(lambda _: self._shaking.pop(engine_id, None))
        return await asyncio.shield(task)

    async def _shake(self, engine_id: str, host: str, port: int) -> _Peer:
        deadline = self._clock() + self._timeout_s
        while True:
            try:
                _, peer = await asyncio.get_running_loop().create_connection(_Peer, host, port)
                break
            except OSError as problem:
                if self._clock() >= deadline:
                    raise KvLoadError(f"handshake with {host}:{port}: {problem}", peer_lost=True) from None
                await asyncio.sleep(min(0.1, self._timeout_s))
        try:
            answer = await asyncio.wait_for(peer.ask({"op": "handshake"}), self._timeout_s)
        except TimeoutError:
            peer.transport.abort()
            raise KvLoadError(f"handshake with {host}:{port}: no answer", peer_lost=True) from None
        if answer.get("engine_id") != engine_id:
            peer.transport.close()
            raise KvLoadError(f"{host}:{port} is not engine {engine_id}", peer_lost=False)
        await asyncio.sleep(self._handshake_s)
        self._known[engine_id] = peer
        self._on_handshake(engine_id)
        return peer


def _number(message: Message, key: str) -> int:
    value = message.get(key)
    if type(value) is not int:
        raise KvLoadError(f"malformed answer: {key}={value!r}", peer_lost=False)
    return value
