"""One request on its way through a simulated engine, from the first byte in to the last byte out."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .http import JSON, Exchange
from .metrics import EngineMetrics
from .request import Wanted
from .sequence import Sequence
from .stream import AnswerHead, EventWriter, Writer
from .tokens import EOS_TOKEN, continuation


class Answer:
    """Holds the answer's tokens and writes them as the steps that produce them end."""

    __slots__ = (
        "_writer",
        "arrived_s",
        "digest",
        "error_at",
        "exchange",
        "finish",
        "first_s",
        "head",
        "last_s",
        "length",
        "loaded",
        "metrics",
        "on_done",
        "request_id",
        "seq",
        "tokens",
        "transfer_params",
        "wanted",
    )

    def __init__(
        self,
        exchange: Exchange,
        wanted: Wanted,
        head: AnswerHead,
        metrics: EngineMetrics,
        arrived_s: float,
        writer: Writer | None = None,
    ) -> None:
        self.exchange = exchange
        self.wanted = wanted
        self.head = head
        self.metrics = metrics
        self.arrived_s = arrived_s
        self.request_id = head.id
        self._writer: Writer = writer or EventWriter(head)
        self.tokens: list[int] = []
        self.digest = b""
        self.length = wanted.max_tokens
        self.finish = "length"
        self.error_at = -1
        self.seq: Sequence | None = None
        self.loaded = 0
        """Prompt tokens whose KV came from elsewhere."""
        self.first_s = -1.0
        self.last_s = -1.0
        self.transfer_params: Callable[[Answer], dict[str, object] | None] = lambda _: None
        self.on_done: Callable[[Answer], None] = lambda _: None

    def begin(self) -> None:
        """Send the head of a stream at once, as vLLM does before it knows whether the request will work."""
        if self.wanted.stream:
            self.exchange.begin_stream()
            if opening := self._writer.opening():
                self.exchange.write(opening)

    def decide(self, digest: bytes, vocabulary: int) -> None:
        """Fix the tokens, now that it is known from which KV they follow, and where they end."""
        self.digest = digest
        self.tokens = continuation(digest, self.length, vocabulary)
        if not self.wanted.ignore_eos and EOS_TOKEN in self.tokens[self.wanted.min_tokens :]:
            self.length = self.tokens.index(EOS_TOKEN, self.wanted.min_tokens) + 1
            self.finish = "stop"
            del self.tokens[self.length :]

    def shorten(self) -> None:
        """Stop at half the length asked for (fault `short_output`)."""
        if self.length > 1:
            self.length //= 2
            self.finish = "stop"

    def token(self, position: int, end_s: float) -> None:
        """Token `position` exists since model time `end_s`: count it and, in a stream, send it."""
        metrics = self.metrics
        last = position + 1 == self.length
        if position == 0:
            self.first_s = end_s
            prompt = len(self.head.prompt)
            metrics.prompt_tokens += prompt
            metrics.by_source["external_kv_transfer"] += self.loaded
            metrics.by_source["local_compute"] += prompt - self.loaded
            metrics.time_to_first_token.observe(end_s - self.arrived_s)
        self.last_s = end_s
        if self.wanted.stream:
            token = self.tokens[position]
            if last:
                event = self._writer.last(token, position, self.finish) + self._writer.final(self.length)
            elif position:
                event = self._writer.token(token, position)
            else:
                event = self._writer.first(token)
            self.exchange.write(event)
        if last:
            self._complete()

    def fail(self) -> None:
        """Answer with an internal error: an event in a stream already begun, a 500 otherwise."""
        self.metrics.finished["error"] += 1
        if self.wanted.stream:
            self.exchange.write(self._writer.error())
            self.exchange.end()
        else:
            self.exchange.respond(500, self._writer.refusal())
        self.on_done(self)

    def _complete(self) -> None:
        m = self.metrics
        seq = self.seq
        m.finished[self.finish] += 1
        m.e2e.observe(self.last_s - self.arrived_s)
        if seq is not None:
            began = seq.scheduled_s
            m.queue_time.observe(max(0.0, began - self.arrived_s))
            m.inference_time.observe(self.last_s - began)
            m.prefill_time.observe(self.first_s - began)
            m.decode_time.observe(self.last_s - self.first_s)
        if self.length > 1:
            m.per_output_token.observe((self.last_s - self.first_s) / (self.length - 1))
        m.request_prompt.observe(len(self.head.prompt))
        m.request_generation.observe(self.length)
        if self.wanted.stream:
            self.exchange.end()
        else:
            body = self._writer.whole(self.tokens, self.finish, self.transfer_params(self))
            self.exchange.respond(200, body, JSON)
        self.on_done(self)


def damaged(digest: bytes, random: Random) -> bytes:
    """KV with one flipped bit (fault `corrupt`)."""
    bit = random.randrange(8 * len(digest))
    value = int.from_bytes(digest, "little") ^ (1 << bit)
    return value.to_bytes(len(digest), "little")
