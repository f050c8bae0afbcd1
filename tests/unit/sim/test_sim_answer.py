"""One answer from its first to its last token: where it ends, what it counts, what it does when things go wrong."""

from __future__ import annotations

import asyncio
import json
from itertools import count

import pytest

from pytest_pdperf.engines.sim.answer import Answer
from pytest_pdperf.engines.sim.http import Connection, Exchange
from pytest_pdperf.engines.sim.metrics import EngineMetrics
from pytest_pdperf.engines.sim.request import Wanted
from pytest_pdperf.engines.sim.sequence import Sequence
from pytest_pdperf.engines.sim.stream import AnswerHead
from pytest_pdperf.engines.sim.tokens import EOS_TOKEN, continuation, kv_digest

VOCABULARY = 151_936
LENGTH = 2000


class Wire(asyncio.Transport):
    """A transport that remembers what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)


def make(
    max_tokens: int = 4, *, stream: bool = True, ignore_eos: bool = True, min_tokens: int = 0
) -> tuple[Answer, Wire]:
    taken: list[Exchange] = []
    connection = Connection(taken.append, lambda *row: None, set())
    wire = Wire()
    connection.connection_made(wire)
    connection.data_received(b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
    wanted = Wanted(
        api="completion",
        prompt=(1, 2, 3),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stream=stream,
        include_usage=True,
        continuous_usage=False,
        return_token_ids=True,
        kv={},
    )
    head = AnswerHead(
        "completion", "cmpl-1", 1, "m", wanted.prompt, return_token_ids=True, include_usage=True
    )
    return Answer(taken[0], wanted, head, EngineMetrics(), arrived_s=10.0), wire


def digest_with_eos() -> tuple[bytes, int]:
    """Some KV after which the end token comes within LENGTH tokens, and at which place."""
    for i in count():
        digest = kv_digest([i])
        tokens = continuation(digest, LENGTH, VOCABULARY)
        if EOS_TOKEN in tokens[1:]:
            return digest, tokens.index(EOS_TOKEN, 1)
    raise AssertionError


def test_the_end_token_ends_an_answer_unless_it_is_ignored_or_too_early() -> None:
    digest, place = digest_with_eos()
    ends, _ = make(LENGTH, ignore_eos=False)
    ends.decide(digest, VOCABULARY)
    assert (ends.length, ends.finish, ends.tokens[-1]) == (place + 1, "stop", EOS_TOKEN)
    ignores, _ = make(LENGTH)
    ignores.decide(digest, VOCABULARY)
    assert (ignores.length, ignores.finish, len(ignores.tokens)) == (LENGTH, "length", LENGTH)
    later, _ = make(LENGTH, ignore_eos=False, min_tokens=place + 1)
    later.decide(digest, VOCABULARY)
    assert later.length > place + 1


@pytest.mark.parametrize("stream", [True, False])
def test_times_and_counts_of_a_whole_answer(stream: bool) -> None:
    answer, wire = make(4, stream=stream)
    done: list[Answer] = []
    answer.on_done = done.append
    answer.seq = Sequence(3, 4)
    answer.seq.scheduled_s = 10.5
    answer.begin()
    answer.decide(kv_digest([1, 2, 3]), VOCABULARY)
    for position, end in enumerate((11.0, 11.1, 11.2, 11.6)):
        answer.token(position, end)
    m = answer.metrics
    assert done == [answer]
    assert m.by_source["local_compute"] == m.prompt_tokens == 3
    assert m.finished["length"] == 1
    for histogram, seconds in (
        (m.time_to_first_token, 1.0),
        (m.queue_time, 0.5),
        (m.prefill_time, 0.5),
        (m.decode_time, 0.6),
        (m.inference_time, 1.1),
        (m.e2e, 1.6),
        (m.per_output_token, 0.2),
        (m.request_generation, 4),
        (m.request_prompt, 3),
    ):
        assert histogram.count == 1
        assert histogram.total == pytest.approx(seconds)
    assert answer.exchange.closed
    if stream:
        assert wire.sent.count(b'"token_ids":[') == 4
        assert wire.sent.endswith(b"0\r\n\r\n")
    else:
        body = json.loads(wire.sent.partition(b"\r\n\r\n")[2])
        assert body["choices"][0]["token_ids"] == continuation(kv_digest([1, 2, 3]), 4, VOCABULARY)


def test_one_token_is_first_and_last() -> None:
    answer, wire = make(1)
    answer.begin()
    answer.decide(kv_digest([1]), VOCABULARY)
    answer.token(0, 11.0)
    assert wire.sent.count(b'"finish_reason":"length"') == 1
    assert wire.sent.count(b"[DONE]") == 1
    assert answer.metrics.per_output_token.count == 0, "undefined for one token"


@pytest.mark.parametrize(("asked", "given"), [(8, 4), (9, 4), (1, 1)])
def test_half_an_answer(asked: int, given: int) -> None:
    answer, _ = make(asked)
    answer.shorten()
    answer.decide(kv_digest([1]), VOCABULARY)
    assert len(answer.tokens) == answer.length == given


@pytest.mark.parametrize("stream", [True, False])
def test_failing(stream: bool) -> None:
    answer, wire = make(stream=stream)
    done: list[Answer] = []
    answer.on_done = done.append
    answer.begin()
    answer.fail()
    assert answer.metrics.finished["error"] == 1
    assert answer.metrics.e2e.count == 0, "a failure is no latency"
    assert done == [answer]
    assert (b"HTTP/1.1 200" in wire.sent) is stream
    assert (b"HTTP/1.1 500" in wire.sent) is not stream
    assert b"Internal server error" in wire.sent
    assert (b"[DONE]" in wire.sent) is stream
