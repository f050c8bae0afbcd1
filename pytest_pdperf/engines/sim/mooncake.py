"""Mooncake as vLLM speaks it: both legs carry one `transfer_id`, either may come first, and prefill sends the KV.

Prefill's answer says nothing about the KV. Decode learns from the prefill engine's bootstrap server where the workers
are, asks, and waits until the prompt is computed there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import orjson

from pytest_pdperf.spec.roles import Role

from .answer import Answer
from .connector import Failures, Parts, Transfer, mean, p90, sizes
from .http import Connection, Exchange
from .pull import PullEnds
from .request import Wanted
from .sequence import State
from .side_channel import KvLoadError, Pulled

_ANSWER_S = 5.0


class MooncakeConnector:
    """Prefill counts the transfers, decode the failed receives, both in their logs only."""

    hit_source = "p2p"
    prometheus = False

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._ends = PullEnds(
            parts,
            connected=lambda peer: (
                f"Mooncake: connected to engine {peer} over {parts.settings.link} (simulated)"
            ),
            sends=True,
            on_sent=self._sent,
        )
        self._workers: dict[str, tuple[str, int]] = {}
        self._bootstrap: set[Connection] = set()

    async def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open prefill's bootstrap server and the port of its workers; say which transport there is."""
        settings = self._parts.settings
        await self._ends.listen(loop)
        if settings.role is Role.PREFILL:
            await loop.create_server(
                lambda: Connection(self._query, self._parts.log.access, self._bootstrap),
                settings.host,
                settings.bootstrap_port,
            )
            self._parts.log.info(
                f"Mooncake Bootstrap Server started at {settings.host}:{settings.bootstrap_port} (simulated)"
            )
        if settings.role is not Role.SERVER:
            self._parts.log.info(
                f"The Mooncake Transfer Engine is using {settings.link} as its protocol. (simulated)"
            )
            self._parts.log.transfer_engine(settings.link)

    def _query(self, exchange: Exchange) -> None:
        if (exchange.method, exchange.path) != ("GET", "/query"):
            exchange.respond(404, b'{"detail":"Not Found"}')
            return
        settings = self._parts.settings
        address = f"tcp://{settings.host}:{settings.side_channel_port}"
        ranks = {str(rank): {"0": address} for rank in range(settings.tensor_parallel)}
        exchange.respond(200, orjson.dumps({"0": {"engine_id": self._parts.engine_id, "worker_addr": ranks}}))

    def keeps(self, kv: Mapping[str, object]) -> bool:
        """As the router asks; without a transfer id nobody could fetch it."""
        if kv.get("do_remote_decode") is not True:
            return False
        if not isinstance(kv.get("transfer_id"), str):
            self._parts.log.warning("Missing transfer_id in kv_transfer_params from router!")
            return False
        return True

    def kept(self, answer: Answer) -> dict[str, object] | None:
        """Hold the blocks under the transfer id, or begin to send them to whoever asked before."""
        if answer.seq is not None and answer.seq.state is State.HELD:
            self._ends.store.hold(str(answer.wanted.kv["transfer_id"]), answer.seq, answer.digest)
        return None

    def transferred(self, key: object, end_s: float) -> None:
        """Tell decode; the blocks are free again."""
        self._ends.store.transferred(key, end_s)

    def _sent(self, seconds: float, size: int, blocks: int) -> None:
        self._parts.through(Transfer(seconds, 0.0, size, blocks))

    def offered(self, wanted: Wanted) -> int:
        """The whole prompt, when the request says so and says from where."""
        if wanted.kv.get("do_remote_prefill") is not True:
            return 0
        if not all(
            isinstance(wanted.kv.get(key), str)
            for key in ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")
        ):
            self._parts.log.warning(
                f"Got invalid KVTransferParams: {dict(wanted.kv)}. This request will not utilize KVTransfer"
            )
            return 0
        return len(wanted.prompt)

    async def fetch(self, wanted: Wanted) -> Pulled:
        """Ask the prefill engine for it and wait, also for a prompt that has not come there yet."""
        return await self._ends.peers.pull(*await self._remote(wanted))

    async def let_go(self, wanted: Wanted, *, fetched: bool) -> None:
        """Nothing to say about what was sent; what is not wanted after all is given back."""
        if not fetched:
            await self._ends.peers.release(*await self._remote(wanted))

    async def _remote(self, wanted: Wanted) -> tuple[str, str, int, str]:
        engine_id, transfer_id = str(wanted.kv["remote_engine_id"]), str(wanted.kv["transfer_id"])
        if engine_id not in self._workers:
            address = str(wanted.kv["remote_bootstrap_addr"])
            self._workers[engine_id] = _worker(await query(address), engine_id, address)
        return (engine_id, *self._workers[engine_id], transfer_id)

    def failed(self, request_id: str, problem: KvLoadError) -> str:
        """One failed receive, however it came about."""
        self._parts.metrics.failed_transfers += 1
        return f"pulling kv_caches for ['{request_id}'] failed: {problem}"

    def window(self, rows: Sequence[Transfer], failures: Failures) -> str | None:
        """No post times; a failure is decode's failed receive."""
        times = [row.seconds * 1e3 for row in rows]
        return (
            f"KV Transfer metrics: Num successful transfers={len(rows)}, Avg xfer time (ms)={mean(times)}, "
            f"P90 xfer time (ms)={p90(times)}, {sizes(rows)}, Num failed transfers=0, "
            f"Num failed recvs={failures.transfers}, Num KV expired reqs={failures.expired}"
        )


async def query(address: str) -> object:
    """The parsed answer of a bootstrap server. Raises KvLoadError when there is none."""
    url = urlsplit(address)
    if url.hostname is None or url.port is None:
        raise KvLoadError(f"remote_bootstrap_addr is {address!r}", peer_lost=False)
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            try:
                writer.write(
                    f"GET /query HTTP/1.1\r\nhost: {url.netloc}\r\nconnection: close\r\n\r\n".encode()
                )
                answer = await reader.read()
            finally:
                writer.close()
        return orjson.loads(answer.partition(b"\r\n\r\n")[2])
    except (OSError, TimeoutError, orjson.JSONDecodeError) as problem:
        raise KvLoadError(f"bootstrap server {address}: {problem!r}", peer_lost=True) from None


def _worker(answer: object, engine_id: str, address: str) -> tuple[str, int]:
    """Host and port of the first worker of an engine. Raises KvLoadError when it is not registered there."""
    entries = answer.values() if isinstance(answer, dict) else ()
    for entry in entries:
        try:
            if entry["engine_id"] == engine_id:
                url = urlsplit(entry["worker_addr"]["0"]["0"])
                if url.hostname is not None and url.port is not None:
                    return url.hostname, url.port
        except (KeyError, TypeError, ValueError):
            continue
    raise KvLoadError(f"engine {engine_id} is not registered at {address}", peer_lost=False)
