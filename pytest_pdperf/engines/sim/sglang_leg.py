"""Prefill's half of a disaggregated request, from the moment it stands in its room."""

from __future__ import annotations

from typing import Protocol

from .log import Log
from .runner import Runner
from .sglang_answer import SglangAnswer
from .sglang_metrics import SglangMetrics
from .sglang_rooms import Rooms


class Prefill(Protocol):
    """What a leg needs of its engine."""

    log: Log
    metrics: SglangMetrics
    rooms: Rooms
    runner: Runner

    def now(self) -> float:
        """Model time."""

    def open(self, answer: SglangAnswer) -> bool:
        """True while somebody waits for the answer."""

    def start_prefill(self, answer: SglangAnswer) -> None:
        """Queue the prompt."""


class PrefillLeg:
    """Waits for decode, computes, sends, answers; or fails with a line in the log and a status 500."""

    def __init__(self, engine: Prefill, answer: SglangAnswer, room: int) -> None:
        self._engine = engine
        self._answer = answer
        self._room = room
        self._computed_s = 0.0

    def bootstrapped(self) -> None:
        """Decode has asked: compute the prompt."""
        waited = self._engine.now() - self._answer.arrived_s
        self._engine.metrics.stage("prefill_bootstrap", waited)
        self._engine.metrics.bootstrap_ms.observe(waited * 1e3)
        self._engine.start_prefill(self._answer)

    def computed(self, end_s: float) -> None:
        """The prompt's KV is there since model time `end_s`."""
        self._computed_s = end_s
        seq = self._answer.seq
        assert seq is not None
        self._engine.metrics.stage("prefill_forward", end_s - seq.scheduled_s)
        self._engine.rooms.computed(self._room, seq, self._answer.digest)

    def sent(self, began_s: float, ended_s: float, size: int) -> None:
        """The KV has left."""
        self._engine.metrics.stage("prefill_transfer_kv_cache", ended_s - self._computed_s)
        self._engine.metrics.sent(ended_s - began_s, size)
        if self._engine.open(self._answer):
            self._answer.hand_in(ended_s)

    def failed(self, stage: str, problem: str) -> None:
        """Nothing will come of it; `stage` is `bootstrap` or `transfer`."""
        engine, answer, room = self._engine, self._answer, self._room
        if not engine.open(answer):
            return
        if stage == "bootstrap":
            engine.metrics.failed_bootstraps += 1
        else:
            engine.metrics.failed_transfers += 1
        engine.log.info(
            f"Prefill {stage} failed for request rank=0 req.rid={answer.request_id!r} req.bootstrap_room={room} "
            f"with exception KVTransferError(bootstrap_room={room}): {problem}"
        )
        if answer.seq is not None:
            engine.runner.cancel(answer.seq)
        answer.abort(problem)
