"""Where the two legs of a disaggregated request meet: a prefill engine's bootstrap rooms.

The router sends both legs at once. Decode reserves blocks and asks for its room over the bootstrap port; only then does
prefill begin to compute, and when it has, its KV crosses the link and both legs go on. Whoever comes first waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .faults import Dice
from .runner import Runner
from .sequence import Sequence
from .sglang_wire import ABORTED
from .side_channel import Message, Reply


class RoomTaken(Exception):
    """Two live requests were given one room."""


class Leg(Protocol):
    """Prefill's half of a request, as its room sees it. Times are model time."""

    def bootstrapped(self) -> None:
        """Decode has asked: compute the prompt."""

    def sent(self, began_s: float, ended_s: float, size: int) -> None:
        """The KV has left."""

    def failed(self, stage: str, problem: str) -> None:
        """Nothing will come of it; `stage` is `bootstrap` or `transfer`."""


class _Room:
    __slots__ = ("began_s", "call_off", "digest", "given_up", "leg", "reply", "seq")

    def __init__(self) -> None:
        self.leg: Leg | None = None
        self.reply: Reply | None = None
        self.seq: Sequence | None = None
        self.digest = b""
        self.began_s = 0.0
        self.given_up = False
        """Decode has let go of it before it asked and before prefill's leg came; that leg must not wait for it."""
        self.call_off: Callable[[], None] = lambda: None


class Rooms:
    """All rooms of one prefill engine, by number. A room that stays half empty is given up after `timeout_s`."""

    def __init__(
        self,
        runner: Runner,
        *,
        bytes_per_token: int,
        timeout_s: float,
        call_later: Callable[[float, Callable[[], None]], Callable[[], None]],
        drop_transfer: Dice,
        name: str,
    ) -> None:
        """`name` is the `host:port` under which decode engines know this one."""
        self.name = name
        self._runner = runner
        self._bytes_per_token = bytes_per_token
        self._timeout_s = timeout_s
        self._call_later = call_later
        self._drop_transfer = drop_transfer
        self._rooms: dict[int, _Room] = {}

    @property
    def bootstrapping(self) -> int:
        """Prefill legs that wait for decode to ask."""
        return sum(room.leg is not None and room.reply is None for room in self._rooms.values())

    @property
    def inflight(self) -> int:
        """Prefill legs whose KV is computed and not yet across."""
        return sum(room.seq is not None for room in self._rooms.values())

    def enter(self, number: int, leg: Leg) -> None:
        """Prefill's leg arrives. Raises RoomTaken while another request lives in the room."""
        room = self._room(number)
        if room.leg is not None:
            raise RoomTaken(number)
        if room.given_up:
            self._close(number)
            leg.failed("transfer", ABORTED)
            return
        room.leg = leg
        self._meet(room)

    def computed(self, number: int, seq: Sequence, digest: bytes) -> None:
        """The prompt's KV is there, held by `seq`: send it."""
        room = self._rooms.get(number)
        if room is None:
            self._runner.release(seq)
            return
        room.seq, room.digest = seq, digest
        if not self._drop_transfer.strikes():
            room.began_s = self._runner.start_transfer(number, seq.prompt_tokens * self._bytes_per_token)

    def transferred(self, key: object, end_s: float) -> None:
        """The link is through with a room's KV: free its blocks and tell both legs."""
        room = self._rooms.get(key) if isinstance(key, int) else None
        if room is None or room.seq is None:
            return
        del self._rooms[key]  # type: ignore[arg-type]
        room.call_off()
        tokens = room.seq.prompt_tokens
        size = tokens * self._bytes_per_token
        self._runner.release(room.seq)
        if room.reply is not None:
            room.reply(
                {
                    "ok": True,
                    "digest": room.digest.hex(),
                    "tokens": tokens,
                    "size": size,
                    "began_s": room.began_s,
                    "ended_s": end_s,
                }
            )
        if room.leg is not None:
            room.leg.sent(room.began_s, end_s, size)

    def leave(self, number: int, problem: str = ABORTED) -> None:
        """Prefill's client has gone, or its request has failed: let decode know."""
        room = self._close(number)
        if room is not None and room.reply is not None:
            room.reply({"ok": False, "error": problem})

    def handle(self, message: Message, reply: Reply) -> None:
        """Serve one line of the bootstrap port."""
        op, text = message.get("op"), str(message.get("request_id", ""))
        if op == "handshake":
            reply({"ok": True, "engine_id": self.name})
        elif not text.isdigit():
            reply({"ok": False, "error": f"{text!r} is no room"})
        elif op == "pull":
            room = self._room(int(text))
            if room.reply is not None or room.given_up:
                problem = ABORTED if room.given_up else f"room {text} is being served already"
                reply({"ok": False, "error": problem})
                return
            room.reply = reply
            self._meet(room)
        elif op == "release":
            reply({"ok": self._give_up(int(text))})
        else:
            reply({"ok": False, "error": f"unknown operation {op!r}"})

    def _give_up(self, number: int) -> bool:
        """Decode lets go of a room; False where nobody stands in it."""
        room = self._rooms.get(number)
        if room is None:
            self._room(number).given_up = True
        if room is None or room.given_up:
            return False
        self._close(number)
        if room.leg is not None:
            room.leg.failed("transfer", ABORTED)
        return True

    def _room(self, number: int) -> _Room:
        room = self._rooms.get(number)
        if room is None:
            room = self._rooms[number] = _Room()
            room.call_off = self._call_later(self._timeout_s, lambda: self._expire(number))
        return room

    def _meet(self, room: _Room) -> None:
        if room.leg is not None and room.reply is not None:
            room.leg.bootstrapped()

    def _close(self, number: int) -> _Room | None:
        room = self._rooms.pop(number, None)
        if room is not None:
            room.call_off()
            if room.seq is not None:
                self._runner.cancel_transfer(number)
                self._runner.release(room.seq)
        return room

    def _expire(self, number: int) -> None:
        room = self._close(number)
        if room is None:
            return
        stage = "Bootstrapping" if room.seq is None else "Transferring"
        problem = f"Request {number} timed out after {self._timeout_s:.1f}s in KVPoll.{stage}"
        if room.reply is not None:
            room.reply({"ok": False, "error": problem})
        if room.leg is not None:
            room.leg.failed("bootstrap" if room.seq is None else "transfer", problem)
