"""KV on its way: what a prefill engine keeps and gives, and what a decode engine makes of good and bad peers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from random import Random

import pytest

from pytest_pdperf.engines.sim.faults import Chance, Dice
from pytest_pdperf.engines.sim.kv_store import KvStore
from pytest_pdperf.engines.sim.link import KvLink
from pytest_pdperf.engines.sim.log import Log
from pytest_pdperf.engines.sim.metrics import EngineMetrics
from pytest_pdperf.engines.sim.profile import FAST, Link
from pytest_pdperf.engines.sim.runner import Runner
from pytest_pdperf.engines.sim.scheduler import StepScheduler
from pytest_pdperf.engines.sim.sequence import Sequence, State
from pytest_pdperf.engines.sim.side_channel import (
    KvLoadError,
    Message,
    PrefillPeers,
    Pulled,
    Reply,
    SideChannelServer,
)


class Prefill:
    """A store with one held prompt, a clock and leases that the test ends."""

    def __init__(self, drop: Chance | None = None, *, sends: bool = False, early: bool = False) -> None:
        self.now = 0.0
        self.sent: list[tuple[float, int, int]] = []
        self.early: list[Message] = []
        self.metrics = EngineMetrics()
        self.leases: list[Callable[[], None]] = []
        self.runner = Runner(
            StepScheduler(FAST),
            KvLink(Link(1000.0)),
            clock=lambda: self.now,
            jitter=lambda: 0.0,
            on_step=lambda step: None,
            on_transfer=self._transferred,
        )
        self.runner.timer = self
        self.store = KvStore(
            self.runner,
            self.metrics,
            Log(lambda text: None),
            engine_id="P",
            bytes_per_token=10,
            lease_s=30.0,
            call_later=self._call_later,
            drop_transfer=Dice(drop or Chance(), Random(0)),
            sends=sends,
            on_sent=lambda seconds, size, blocks: self.sent.append((seconds, size, blocks)),
        )
        if early:
            self.early = self.ask("pull")
        self.seq = Sequence(100, 1, hold=True)
        self.runner.submit(self.seq, 0.0)
        self.now = 1.0
        self.runner.wake()
        assert self.seq.state is State.HELD
        self.blocks = self.store.hold("r", self.seq, b"kv")

    def _transferred(self, key: object, end_s: float) -> None:
        self.store.transferred(key, end_s)

    def set(self, when: float | None) -> None:
        pass

    def close(self) -> None:
        pass

    def _call_later(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        assert seconds == 30.0
        self.leases.append(action)
        return lambda: self.leases.remove(action) if action in self.leases else None

    def ask(self, op: str, request_id: str = "r", engine_id: str = "P") -> list[Message]:
        answers: list[Message] = []
        self.store.handle({"op": op, "request_id": request_id, "engine_id": engine_id}, answers.append)
        return answers


def test_a_pull_takes_the_links_time_and_a_release_frees_the_blocks() -> None:
    prefill = Prefill()
    assert len(prefill.blocks) == len(set(prefill.blocks)) == 7
    answers = prefill.ask("pull")
    assert answers == []
    assert prefill.leases == [], "no lease runs while the transfer does"
    prefill.now = 2.5
    prefill.runner.wake()
    assert answers == [
        {"ok": True, "digest": b"kv".hex(), "tokens": 100, "size": 1000, "began_s": 1.0, "ended_s": 2.0}
    ]
    assert prefill.runner.scheduler.used_blocks == 7
    assert prefill.ask("release") == [{"ok": True}]
    assert prefill.runner.scheduler.used_blocks == 0
    assert prefill.leases == []
    assert prefill.ask("release") == [{"ok": False}]
    assert prefill.metrics.notifications_after_expiry == 1


def test_an_unfetched_prompt_expires() -> None:
    prefill = Prefill()
    (lease,) = prefill.leases
    lease()
    assert prefill.metrics.kv_expired == 1
    assert prefill.runner.scheduler.used_blocks == 0
    assert prefill.ask("pull")[0]["ok"] is False


def test_a_transfer_that_never_gets_its_release_expires_too() -> None:
    prefill = Prefill()
    prefill.ask("pull")
    prefill.now = 3.0
    prefill.runner.wake()
    (lease,) = prefill.leases
    lease()
    assert prefill.metrics.kv_expired == 1


def test_a_dropped_transfer_is_never_answered_and_its_lease_runs_on() -> None:
    prefill = Prefill(Chance(every=1))
    answers = prefill.ask("pull")
    prefill.now = 10.0
    prefill.runner.wake()
    assert answers == []
    assert len(prefill.leases) == 1


@pytest.mark.parametrize(
    ("op", "changed"),
    [("pull", {"engine_id": "other"}), ("pull", {"request_id": "other"}), ("dance", {})],
)
def test_wrong_questions_are_refused(op: str, changed: Mapping[str, str]) -> None:
    prefill = Prefill()
    (answer,) = prefill.ask(op, **changed)
    assert answer["ok"] is False
    assert answer["error"]
    assert prefill.runner.scheduler.used_blocks == 7


def test_two_pulls_of_one_request_are_one_too_many() -> None:
    prefill = Prefill()
    assert prefill.ask("pull") == []
    assert prefill.ask("pull")[0]["ok"] is False


def test_a_sending_store_frees_its_blocks_as_soon_as_they_are_sent_and_counts_them() -> None:
    prefill = Prefill(sends=True)
    answers = prefill.ask("pull")
    assert prefill.runner.scheduler.used_blocks == 7
    prefill.now = 2.5
    prefill.runner.wake()
    assert [answer["tokens"] for answer in answers] == [100]
    assert prefill.sent == [(1.0, 1000, 7)]
    assert prefill.runner.scheduler.used_blocks == 0
    assert prefill.leases == []
    assert prefill.metrics.notifications_after_expiry == 0


def test_a_pull_that_comes_before_its_prompt_waits_for_it() -> None:
    prefill = Prefill(sends=True, early=True)
    assert prefill.early == [], "it was asked for before there was anything"
    assert len(prefill.leases) == 0, "neither patience nor lease runs while the transfer does"
    prefill.now = 2.5
    prefill.runner.wake()
    assert [answer["ok"] for answer in prefill.early] == [True]
    assert prefill.runner.scheduler.used_blocks == 0


def test_a_pull_whose_prompt_never_comes_is_told_so() -> None:
    prefill = Prefill(sends=True)
    answers = prefill.ask("pull", request_id="never")
    assert answers == []
    assert prefill.ask("pull", request_id="never")[0]["ok"] is False, "one pull a prompt"
    patience = prefill.leases[-1]
    patience()
    assert answers == [{"ok": False, "error": "Timeout waiting for P side ready."}]


# -- the wire

Client = Callable[[PrefillPeers, int, list[str]], Awaitable[None]]
GOOD = {"ok": True, "digest": "0a", "tokens": 3, "size": 30, "began_s": 1.5, "ended_s": 2.5}


def converse(
    client: Client,
    handler: Callable[[Message, Reply], None] | None,
    raw: bytes = b"",
    *,
    named_by_address: bool = False,
) -> list[str]:
    """Run a decode side against a prefill side on loopback; `raw` is a peer that answers with just that."""
    shaken: list[str] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        if handler is not None:
            server = await loop.create_server(lambda: SideChannelServer(handler), "127.0.0.1", 0)
        else:

            async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.read(1)
                writer.write(raw)
                await reader.read()
                writer.close()

            server = await asyncio.start_server(rude, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        peers = PrefillPeers(
            handshake_s=0.0,
            timeout_s=0.3,
            clock=time.monotonic,
            on_handshake=shaken.append,
            named_by_address=named_by_address,
        )
        await asyncio.wait_for(client(peers, port, shaken), 20)
        server.close()

    asyncio.run(run())
    return shaken


def obliging(message: Message, reply: Reply) -> None:
    reply({"ok": True, "engine_id": "P"} if message["op"] == "handshake" else GOOD)


def test_a_handshake_comes_once_even_for_pulls_at_the_same_time() -> None:
    async def client(peers: PrefillPeers, port: int, shaken: list[str]) -> None:
        pulled = await asyncio.gather(*(peers.pull("P", "127.0.0.1", port, f"r{i}") for i in range(5)))
        assert pulled == [Pulled(b"\n", 3, 30, 1.5, 2.5)] * 5
        assert await peers.pull("P", "192.0.2.1", 1, "r") == pulled[0], "a known engine needs no address"
        await peers.release("P", "192.0.2.1", 1, "r")

    assert converse(client, obliging) == ["P"]


def test_answers_find_their_questions_in_any_order() -> None:
    waiting: list[tuple[str, Reply]] = []

    def backwards(message: Message, reply: Reply) -> None:
        if message["op"] == "handshake":
            reply({"engine_id": "P"})
            return
        waiting.append((str(message["request_id"]), reply))
        if len(waiting) == 3:
            for request_id, late in reversed(waiting):
                late(GOOD | {"tokens": int(request_id)})

    async def client(peers: PrefillPeers, port: int, shaken: list[str]) -> None:
        pulled = await asyncio.gather(*(peers.pull("P", "127.0.0.1", port, str(i)) for i in (7, 8, 9)))
        assert [p.tokens for p in pulled] == [7, 8, 9]

    converse(client, backwards)


def failing(engine: str, handler: Callable[[Message, Reply], None] | None, raw: bytes = b"") -> KvLoadError:
    caught: list[KvLoadError] = []

    async def client(peers: PrefillPeers, port: int, shaken: list[str]) -> None:
        with pytest.raises(KvLoadError) as problem:
            await peers.pull(engine, "127.0.0.1", port, "r")
        caught.append(problem.value)

    assert engine not in converse(client, handler, raw) or engine == "P"
    return caught[0]


def test_the_wrong_engine_is_refused_without_being_remembered() -> None:
    assert not failing("other", obliging).peer_lost


def test_a_refusal_is_passed_on() -> None:
    def refusing(message: Message, reply: Reply) -> None:
        reply(
            {"engine_id": "P"} if message["op"] == "handshake" else {"ok": False, "error": "no such request"}
        )

    problem = failing("P", refusing)
    assert str(problem) == "no such request"
    assert not problem.peer_lost


@pytest.mark.parametrize("changed", [{"digest": "xy"}, {"tokens": "3"}, {"size": None}, {"began_s": None}])
def test_malformed_answers_are_failed_loads(changed: dict[str, object]) -> None:
    def garbled(message: Message, reply: Reply) -> None:
        reply({"engine_id": "P"} if message["op"] == "handshake" else GOOD | changed)

    assert "malformed" in str(failing("P", garbled))


@pytest.mark.parametrize(
    "raw", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"[1]\n"], ids=["silent", "http", "list"]
)
def test_a_peer_that_does_not_speak_the_protocol_is_given_up(raw: bytes) -> None:
    assert failing("P", None, raw).peer_lost


def test_nobody_there_is_given_up_after_the_timeout() -> None:
    async def client(peers: PrefillPeers, port: int, shaken: list[str]) -> None:
        import socket

        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            closed = sock.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(KvLoadError) as problem:
            await peers.pull("P", "127.0.0.1", closed, "r")
        assert problem.value.peer_lost
        assert time.monotonic() - began >= 0.3

    converse(client, obliging)


def test_a_peer_that_goes_away_fails_what_is_open_and_what_comes_after() -> None:
    def leaving(message: Message, reply: Reply) -> None:
        if message["op"] == "handshake":
            reply({"engine_id": "P"})

    async def client(peers: PrefillPeers, port: int, shaken: list[str]) -> None:
        pull = asyncio.ensure_future(peers.pull("P", "127.0.0.1", port, "r"))
        while not shaken:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        peers._known["P"].transport.abort()
        for attempt in (pull, peers.pull("P", "127.0.0.1", port, "r2")):
            with pytest.raises(KvLoadError) as problem:
                await attempt
            assert problem.value.peer_lost

    converse(client, leaving)


def test_an_engine_named_by_its_address_is_met_anew_after_it_has_gone() -> None:
    async def client(peers: PrefillPeers, port: int, shaken: list[str]) -> None:
        await peers.pull("P", "127.0.0.1", port, "r")
        peers._known["P"].transport.abort()
        await asyncio.sleep(0)
        assert (await peers.pull("P", "127.0.0.1", port, "r2")).tokens == 3

    assert converse(client, obliging, named_by_address=True) == ["P", "P"]
