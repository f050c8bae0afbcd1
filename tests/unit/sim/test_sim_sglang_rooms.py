"""Bootstrap rooms: either leg may come first, nothing is computed for one alone, and every end frees the blocks."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_pdperf.engines.sim.faults import Chance, Dice
from pytest_pdperf.engines.sim.link import KvLink
from pytest_pdperf.engines.sim.profile import FAST
from pytest_pdperf.engines.sim.runner import Runner
from pytest_pdperf.engines.sim.scheduler import StepScheduler
from pytest_pdperf.engines.sim.sequence import Sequence, State, Step
from pytest_pdperf.engines.sim.sglang_rooms import Rooms, RoomTaken
from pytest_pdperf.engines.sim.side_channel import Message

BYTES = FAST.kv_bytes_per_token
ROOM = 2**63 - 5


class NoTimer:
    def set(self, when: float | None) -> None:
        pass

    def close(self) -> None:
        pass


class Leg:
    """Prefill's half: submits its prompt when decode has asked, as the engine does."""

    def __init__(self, house: House, room: int, prompt: int) -> None:
        self.house, self.room, self.prompt = house, room, prompt
        self.seq: Sequence | None = None
        self.events: list[tuple[object, ...]] = []

    def bootstrapped(self) -> None:
        self.events.append(("bootstrapped",))
        self.seq = Sequence(self.prompt, 1, hold=True, payload=self)
        self.house.runner.submit(self.seq, self.house.now)

    def sent(self, began_s: float, ended_s: float, size: int) -> None:
        self.events.append(("sent", size))
        assert began_s < ended_s

    def failed(self, stage: str, problem: str) -> None:
        self.events.append(("failed", stage, problem))
        if self.seq is not None:
            self.house.runner.cancel(self.seq)

    @property
    def told(self) -> list[object]:
        return [event[0] for event in self.events]


class House:
    """Rooms on a real scheduler and link, with a clock that is set by hand."""

    def __init__(self, drop: Chance | None = None) -> None:
        self.now = 0.0
        self.timers: dict[int, tuple[float, Callable[[], None]]] = {}
        self.runner = Runner(
            StepScheduler(FAST),
            KvLink(FAST.links["tcp"]),
            clock=lambda: self.now,
            jitter=lambda: 0.0,
            on_step=self.on_step,
            on_transfer=self.on_transfer,
        )
        self.runner.timer = NoTimer()
        self.rooms = Rooms(
            self.runner,
            bytes_per_token=BYTES,
            timeout_s=30.0,
            call_later=self.call_later,
            drop_transfer=Dice(drop or Chance(), Random(1)),
            name="127.0.0.1:8998",
        )

    def call_later(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        number = len(self.timers) + 1
        self.timers[number] = (self.now + seconds, action)
        return lambda: self.timers.__setitem__(number, (float("inf"), action))

    def on_step(self, step: Step) -> None:
        for seq in step.finished:
            leg = seq.payload
            assert isinstance(leg, Leg)
            self.rooms.computed(leg.room, seq, b"0123456789abcdef")

    def on_transfer(self, key: object, end_s: float) -> None:
        self.rooms.transferred(key, end_s)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.01)
            self.runner.wake()
            for number, (due, action) in list(self.timers.items()):
                if due <= self.now:
                    self.timers[number] = (float("inf"), action)
                    action()

    def pull(self, room: int = ROOM) -> list[Message]:
        answers: list[Message] = []
        self.rooms.handle({"op": "pull", "request_id": str(room)}, answers.append)
        return answers

    def enter(self, room: int = ROOM, prompt: int = 100) -> Leg:
        leg = Leg(self, room, prompt)
        self.rooms.enter(room, leg)
        return leg

    @property
    def clean(self) -> bool:
        scheduler = self.runner.scheduler
        return scheduler.used_blocks == 0 and self.runner.link.outstanding == 0 and self.rooms.inflight == 0


@pytest.mark.parametrize("prefill_first", [True, False])
def test_the_legs_meet_whoever_comes_first(prefill_first: bool) -> None:
    house = House()
    if prefill_first:
        leg = house.enter()
        house.run(1.0)
        assert leg.told == [], "nothing is computed before decode asks"
        assert house.rooms.bootstrapping == 1
        answers = house.pull()
    else:
        answers = house.pull()
        house.run(1.0)
        leg = house.enter()
    assert leg.told == ["bootstrapped"]
    house.run(2.0)
    assert leg.events == [("bootstrapped",), ("sent", 100 * BYTES)]
    (answer,) = answers
    assert answer["ok"] is True
    assert answer["tokens"] == 100
    assert answer["digest"] == b"0123456789abcdef".hex()
    assert house.clean
    assert house.rooms.bootstrapping == 0


def test_blocks_are_held_until_the_kv_is_across() -> None:
    house = House()
    leg = house.enter(prompt=10_000)
    answers = house.pull()
    while house.rooms.inflight == 0:
        house.run(0.01)
    assert leg.seq is not None
    assert leg.seq.state is State.HELD
    assert not house.clean
    assert answers == []
    house.run(5.0)
    assert leg.told == ["bootstrapped", "sent"]
    assert house.clean


def test_two_live_requests_cannot_share_a_room_and_later_ones_may() -> None:
    house = House()
    house.enter()
    with pytest.raises(RoomTaken):
        house.enter()
    house.pull()
    refused = house.pull()
    assert refused[0]["ok"] is False
    house.run(2.0)
    again = house.enter()
    house.pull()
    house.run(2.0)
    assert again.told == ["bootstrapped", "sent"]


def test_a_lone_leg_gives_up_in_time() -> None:
    house = House()
    leg = house.enter()
    house.run(31.0)
    assert leg.events == [
        ("failed", "bootstrap", f"Request {ROOM} timed out after 30.0s in KVPoll.Bootstrapping")
    ]
    answers = house.pull(7)
    house.run(31.0)
    assert answers == [{"ok": False, "error": "Request 7 timed out after 30.0s in KVPoll.Bootstrapping"}]
    assert house.clean


def test_a_transfer_that_never_ends_fails_both_legs_and_frees_the_blocks() -> None:
    house = House(drop=Chance(every=1))
    leg = house.enter()
    answers = house.pull()
    house.run(10.0)
    assert leg.told == ["bootstrapped"]
    assert not house.clean
    house.run(25.0)
    assert leg.events[-1][:2] == ("failed", "transfer")
    assert answers[0]["ok"] is False
    assert house.clean


def test_the_client_of_prefill_leaves() -> None:
    for wait in (0.0, 0.03, 0.12):
        house = House()
        leg = house.enter(prompt=3000)
        answers = house.pull()
        house.run(wait)
        if leg.seq is not None:
            house.runner.cancel(leg.seq)
        house.rooms.leave(ROOM)
        house.run(5.0)
        assert "sent" not in leg.told
        assert answers == [{"ok": False, "error": "Aborted by AbortReq."}]
        assert house.clean


def test_decode_gives_up() -> None:
    house = House()
    leg = house.enter(prompt=3000)
    house.pull()
    house.run(0.05)
    done: list[Message] = []
    house.rooms.handle({"op": "release", "request_id": str(ROOM)}, done.append)
    house.run(5.0)
    assert done == [{"ok": True}]
    assert leg.events[-1] == ("failed", "transfer", "Aborted by AbortReq.")
    assert house.clean
    house.rooms.handle({"op": "release", "request_id": str(ROOM)}, done.append)
    assert done[-1] == {"ok": False}


def test_prefill_does_not_wait_for_a_decode_leg_that_gave_up_before_it_came() -> None:
    house = House()
    done: list[Message] = []
    for _ in range(2):
        house.rooms.handle({"op": "release", "request_id": str(ROOM)}, done.append)
    assert done == [{"ok": False}] * 2
    assert house.pull() == [{"ok": False, "error": "Aborted by AbortReq."}]
    leg = house.enter()
    assert leg.events == [("failed", "transfer", "Aborted by AbortReq.")]
    again = house.enter()
    house.pull()
    house.run(2.0)
    assert again.told == ["bootstrapped", "sent"], "the number is free again"
    house.rooms.handle({"op": "release", "request_id": "7"}, done.append)
    house.run(31.0)
    assert house.enter(7).told == [], "nobody remembers a room for ever"


@pytest.mark.parametrize(
    ("message", "says"),
    [({"op": "pull", "request_id": "x"}, "'x' is no room"), ({"op": "dance", "request_id": "1"}, "'dance'")],
)
def test_nonsense_on_the_bootstrap_port_is_answered(message: Message, says: str) -> None:
    answers: list[Message] = []
    House().rooms.handle(message, answers.append)
    assert says in str(answers[0]["error"])
    House().rooms.handle({"op": "handshake"}, answers.append)
    assert answers[1]["engine_id"] == "127.0.0.1:8998"


ACTS = st.sampled_from(["enter", "pull", "leave", "release", "wait"])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(ACTS, st.integers(1, 3)), max_size=25))
def test_whatever_happens_nothing_stays_behind(script: list[tuple[str, int]]) -> None:
    house = House()
    legs: list[Leg] = []
    for act, room in script:
        if act == "enter":
            try:
                legs.append(house.enter(room, prompt=400))
            except RoomTaken:
                continue
        elif act == "pull":
            house.pull(room)
        elif act == "leave":
            for leg in legs:
                if leg.room == room and leg.seq is not None and leg.told[-1] == "bootstrapped":
                    house.runner.cancel(leg.seq)
            house.rooms.leave(room)
        elif act == "release":
            house.rooms.handle({"op": "release", "request_id": str(room)}, lambda answer: None)
        else:
            house.run(0.05)
    house.run(65.0)
    assert house.clean
    assert house.rooms.bootstrapping == 0
    for leg in legs:
        assert leg.told.count("sent") + leg.told.count("failed") <= 1
