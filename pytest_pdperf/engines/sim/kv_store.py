"""KV that a prefill engine keeps for decode engines to fetch: blocks on hold, leases, and the pulls in flight."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from .faults import Dice
from .log import Log
from .metrics import EngineMetrics
from .runner import Runner
from .sequence import Sequence
from .side_channel import Message, Reply


class _Held:
    __slots__ = ("began_s", "digest", "lease", "reply", "seq", "size")

    def __init__(self, seq: Sequence, digest: bytes, size: int) -> None:
        self.seq = seq
        self.digest = digest
        self.size = size
        self.reply: Reply | None = None
        self.began_s = 0.0
        self.lease: Callable[[], None] = lambda: None


class KvStore:
    """Answers the side channel. Blocks go back on decode's release, or when their lease ends without a pull.

    A store that `sends` is Mooncake's: a pull may come before its prompt and waits for as long as a lease lasts, and
    the blocks go back as soon as they are sent.
    """

    def __init__(
        self,
        runner: Runner,
        metrics: EngineMetrics,
        log: Log,
        *,
        engine_id: str,
        bytes_per_token: int,
        lease_s: float,
        call_later: Callable[[float, Callable[[], None]], Callable[[], None]],
        drop_transfer: Dice,
        sends: bool = False,
        on_sent: Callable[[float, int, int], None] = lambda seconds, size, blocks: None,
    ) -> None:
        """`call_later(seconds, action)` gives back how to call it off; `on_sent` is told seconds, bytes and blocks."""
        self.engine_id = engine_id
        self._runner = runner
        self._metrics = metrics
        self._log = log
        self._bytes_per_token = bytes_per_token
        self._lease_s = lease_s
        self._call_later = call_later
        self._drop_transfer = drop_transfer
        self._sends = sends
        self._on_sent = on_sent
        self._held: dict[str, _Held] = {}
        self._early: dict[str, tuple[Reply, Callable[[], None]]] = {}
        """Pulls that wait for their prompt: how to answer, and how to call the end of their patience off."""
        self._blocks = count(1)

    def hold(self, request_id: str, seq: Sequence, digest: bytes) -> list[int]:
        """Keep a finished prompt's KV under `request_id`; returns the numbers of its blocks."""
        held = _Held(seq, digest, seq.prompt_tokens * self._bytes_per_token)
        self._held[request_id] = held
        held.lease = self._call_later(self._lease_s, lambda: self._expire(request_id))
        if request_id in self._early:
            reply, patience = self._early.pop(request_id)
            patience()
            self._pull(request_id, reply)
        return [next(self._blocks) for _ in range(seq.blocks)]

    def handle(self, message: Message, reply: Reply) -> None:
        """Serve one line of the side channel."""
        op = message.get("op")
        request_id = str(message.get("request_id", ""))
        if op == "handshake":
            reply({"ok": True, "engine_id": self.engine_id})
        elif message.get("engine_id") != self.engine_id:
            reply({"ok": False, "error": f"this is engine {self.engine_id}"})
        elif op == "pull":
            self._pull(request_id, reply)
        elif op == "release":
            known = self._release(request_id)
            if not known:
                self._metrics.notifications_after_expiry += 1
            reply({"ok": known})
        else:
            reply({"ok": False, "error": f"unknown operation {op!r}"})

    def transferred(self, key: object, end_s: float) -> None:
        """The link is through with a transfer."""
        held = self._held.get(str(key))
        if held is None or held.reply is None:
            return
        reply, held.reply = held.reply, None
        held.lease = self._call_later(self._lease_s, lambda: self._expire(str(key)))
        reply(
            {
                "ok": True,
                "digest": held.digest.hex(),
                "tokens": held.seq.prompt_tokens,
                "size": held.size,
                "began_s": held.began_s,
                "ended_s": end_s,
            }
        )
        if self._sends:
            self._on_sent(end_s - held.began_s, held.size, held.seq.blocks)
            self._release(str(key))

    def _pull(self, request_id: str, reply: Reply) -> None:
        held = self._held.get(request_id)
        if held is None and self._sends and request_id not in self._early:
            patience = self._call_later(self._lease_s, lambda: self._give_up(request_id))
            self._early[request_id] = (reply, patience)
        elif held is None:
            reply({"ok": False, "error": f"no KV is held for request {request_id}"})
        elif held.reply is not None:
            reply({"ok": False, "error": f"the KV of request {request_id} is being fetched already"})
        elif not self._drop_transfer.strikes():
            held.lease()
            held.reply = reply
            held.began_s = self._runner.start_transfer(request_id, held.size)

    def _give_up(self, request_id: str) -> None:
        reply, _ = self._early.pop(request_id)
        reply({"ok": False, "error": "Timeout waiting for P side ready."})

    def _release(self, request_id: str) -> bool:
        held = self._held.pop(request_id, None)
        if held is None:
            return False
        held.lease()
        if held.reply is not None:
            self._runner.cancel_transfer(request_id)
        self._runner.release(held.seq)
        return True

    def _expire(self, request_id: str) -> None:
        if self._release(request_id):
            self._metrics.kv_expired += 1
            self._log.warning(
                f"Releasing expired KV blocks for request {request_id}, which were not fetched before their lease "
                f"of {self._lease_s:.0f} s ended."
            )
