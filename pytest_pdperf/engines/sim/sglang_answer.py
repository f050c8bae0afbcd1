"""One request inside a simulated SGLang engine: what differs from an answer that one engine gives alone."""

from __future__ import annotations

from collections.abc import Callable

from .answer import Answer
from .http import Exchange
from .request import Wanted
from .sglang_metrics import SglangMetrics
from .sglang_wire import Bootstrap, GenerateWriter, OpenAiWriter
from .stream import AnswerHead


class SglangAnswer(Answer):
    """An answer in SGLang's words; with a bootstrap room it is one leg of a disaggregated request."""

    __slots__ = ("_counts", "bootstrap", "leg", "on_computed", "shift", "writer")

    def __init__(
        self,
        exchange: Exchange,
        wanted: Wanted,
        head: AnswerHead,
        metrics: SglangMetrics,
        arrived_s: float,
        writer: GenerateWriter | OpenAiWriter,
        bootstrap: Bootstrap | None,
    ) -> None:
        super().__init__(exchange, wanted, head, metrics, arrived_s, writer)
        self.writer = writer
        self._counts = metrics
        self.bootstrap = bootstrap
        self.shift = 0
        """Tokens that were there before this engine's first step: prefill's token, sent along with the KV."""
        self.on_computed: Callable[[float], None] | None = None
        """Set on prefill's leg: its only token is told here, and sent when the KV has left (see `hand_in`)."""

    def begin(self) -> None:
        """`/generate` sends the head of a stream at once, the OpenAI routes wait for the first event."""
        if isinstance(self.writer, GenerateWriter):
            super().begin()

    def token(self, position: int, end_s: float) -> None:
        """Token `position` of this engine's steps exists since model time `end_s`."""
        if self.on_computed is not None:
            self.on_computed(end_s)
            return
        self._begin_late()
        super().token(position + self.shift, end_s)

    def hand_in(self, end_s: float) -> None:
        """Prefill's leg is over: its KV has left at model time `end_s`."""
        self._begin_late()
        super().token(0, end_s)

    def abort(self, problem: str) -> None:
        """Fail with a reason that the client gets to see."""
        self.writer.problem = problem
        self._begin_late()
        self.fail()

    def _complete(self) -> None:
        counts, seq = self._counts, self.seq
        counts.finish(self.wanted.stream, len(self.head.prompt), self.length)
        if seq is not None:
            counts.waited.observe(max(0.0, seq.scheduled_s - seq.queued_s))
            if self.bootstrap is None:
                counts.stage("prefill_forward", self.first_s - seq.scheduled_s)
        super()._complete()

    def _begin_late(self) -> None:
        if self.wanted.stream and not self.exchange.answered:
            super().begin()
