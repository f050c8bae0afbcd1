"""NIXL as vLLM speaks it: prefill's answer says where the KV is, decode pulls it over a side channel and lets go."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from .answer import Answer
from .connector import Failures, Parts, Transfer, mean, p90, sizes
from .pull import PullEnds
from .request import Wanted
from .sequence import State
from .side_channel import KvLoadError, Pulled


class NixlConnector:
    """Decode counts the transfers, in its log and on /metrics."""

    hit_source = "p2p"
    prometheus = True

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._ends = PullEnds(
            parts, connected=lambda peer: f"NIXL compatibility check passed (simulated, engine {peer})"
        )

    async def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open prefill's side channel."""
        await self._ends.listen(loop)

    def keeps(self, kv: Mapping[str, object]) -> bool:
        """As the router asks with `do_remote_decode`."""
        return kv.get("do_remote_decode") is True

    def kept(self, answer: Answer) -> dict[str, object] | None:
        """The object that the router hands to decode as it is; None when nothing is held."""
        seq, settings = answer.seq, self._parts.settings
        if seq is None or seq.state is not State.HELD:
            return None
        request_id = f"{answer.request_id}-0-{self._parts.random.getrandbits(32):08x}"
        blocks = self._ends.store.hold(request_id, seq, answer.digest)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": self._parts.engine_id,
            "remote_request_id": request_id,
            "remote_host": settings.host,
            "remote_port": settings.side_channel_port,
            "tp_size": settings.tensor_parallel,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": seq.prompt_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }

    def transferred(self, key: object, end_s: float) -> None:
        """Answer the pull; the blocks stay until decode has let go."""
        self._ends.store.transferred(key, end_s)

    def offered(self, wanted: Wanted) -> int:
        """The whole prompt, when the request says so."""
        return len(wanted.prompt) if wanted.kv.get("do_remote_prefill") is True else 0

    async def fetch(self, wanted: Wanted) -> Pulled:
        """Pull from the prefill engine that the request names."""
        asked = self._parts.clock()
        pulled = await self._ends.peers.pull(*_remote(wanted))
        post = max(0.0, pulled.began_s - asked)
        blocks = -(-pulled.tokens // self._parts.settings.profile.block_tokens)
        row = Transfer(pulled.ended_s - pulled.began_s, post, pulled.size, blocks)
        m = self._parts.metrics
        m.transfer_time.observe(row.seconds)
        m.post_time.observe(row.post_s)
        m.transfer_bytes.observe(row.size)
        m.descriptors.observe(row.descriptors)
        self._parts.through(row)
        return pulled

    async def let_go(self, wanted: Wanted, *, fetched: bool) -> None:
        """Notify prefill, whatever became of the KV."""
        try:
            await self._ends.peers.release(*_remote(wanted))
        except KvLoadError:
            self._parts.metrics.failed_notifications += 1

    def failed(self, request_id: str, problem: KvLoadError) -> str:
        """A dead prefill engine makes more failed transfers than failed requests, as observed with vLLM 0.32."""
        self._parts.metrics.failed_transfers += 2 if problem.peer_lost else 1
        self._parts.metrics.failed_notifications += 1 if problem.peer_lost else 0
        return (
            "NIXL transfer failure: transfer_setup_failed. Marking blocks as invalid | Context: "
            f"{{'request_id': '{request_id}', 'reason': '{problem}'}}"
        )

    def window(self, rows: Sequence[Transfer], failures: Failures) -> str | None:
        """Post times and three counts of what failed, as vLLM 0.32 prints them."""
        times, posts = [row.seconds * 1e3 for row in rows], [row.post_s * 1e3 for row in rows]
        return (
            f"KV Transfer metrics: Num successful transfers={len(rows)}, Avg xfer time (ms)={mean(times)}, "
            f"P90 xfer time (ms)={p90(times)}, Avg post time (ms)={mean(posts)}, P90 post time (ms)={p90(posts)}, "
            f"{sizes(rows)}, Num failed transfers={failures.transfers}, Num KV expired reqs={failures.expired}, "
            f"Num notifs after expiry={failures.late}"
        )


def _remote(wanted: Wanted) -> tuple[str, str, int, str]:
    """Engine id, host, port and request id out of `kv_transfer_params`."""
    kv = wanted.kv
    engine, host, port = kv.get("remote_engine_id"), kv.get("remote_host"), kv.get("remote_port")
    request = kv.get("remote_request_id")
    if not isinstance(engine, str) or not isinstance(host, str) or not isinstance(request, str):
        raise KvLoadError(
            "kv_transfer_params lacks remote_engine_id, remote_host or remote_request_id", peer_lost=False
        )
    if type(port) is not int or not 0 < port < 65536:
        raise KvLoadError(f"kv_transfer_params has remote_port={port!r}", peer_lost=False)
    return engine, host, port, request
