"""What the simulated SGLang reads and writes: 64-bit rooms, `/generate` in both streaming forms, OpenAI bodies."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.engines.sim.request import Limits, Refused
from pytest_pdperf.engines.sim.sglang_wire import (
    GenerateWriter,
    OpenAiWriter,
    bootstrap_of,
    parse_generate,
    refusal_body,
)
from pytest_pdperf.engines.sim.stream import AnswerHead, Api, Writer
from pytest_pdperf.load.dialects import GenerateReader, read_openai

LIMITS = Limits("m", 1024, 1000)
TOKENS = [7, 300, 7, 999]
ROUTER = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998}


def head(api: Api = "completion", **more: bool) -> AnswerHead:
    return AnswerHead(api=api, id="r1", created=5, model="m", prompt=(1, 2, 3), **more)


def events(writer: Writer, tokens: list[int] = TOKENS, finish: str = "length") -> list[dict[str, Any]]:
    """Every event of a stream, parsed; the end mark must be there and is dropped."""
    last = len(tokens) - 1
    data = writer.opening() + (writer.first(tokens[0]) if last else b"")
    data += b"".join(writer.token(token, i) for i, token in enumerate(tokens) if 0 < i < last)
    data += writer.last(tokens[last], last, finish) + writer.final(len(tokens))
    return parsed(data)


def parsed(data: bytes) -> list[dict[str, Any]]:
    *parts, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@given(st.integers(0, 2**64 - 1))
def test_a_room_keeps_all_its_64_bits(room: int) -> None:
    body = orjson.loads(orjson.dumps(ROUTER | {"bootstrap_room": room}))
    found = bootstrap_of(body)
    assert found is not None
    assert (found.host, found.port, found.room) == ("127.0.0.1", 8998, room)


@pytest.mark.parametrize(
    "field",
    [
        {"bootstrap_room": 1.5},
        {"bootstrap_room": "7"},
        {"bootstrap_room": -1},
        {"bootstrap_room": 2**64},
        {"bootstrap_room": True},
        {"bootstrap_host": None},
        {"bootstrap_port": None},
        {"bootstrap_port": 0},
    ],
)
def test_odd_bootstrap_fields_are_refused_by_name(field: dict[str, object]) -> None:
    with pytest.raises(Refused, match=next(iter(field))):
        bootstrap_of(ROUTER | {"bootstrap_room": 7} | field)


def test_no_room_is_no_bootstrap() -> None:
    assert bootstrap_of({}) is None
    assert bootstrap_of(ROUTER | {"bootstrap_room": None}) is None


def test_generate_takes_ids_or_text() -> None:
    wanted = parse_generate(
        {
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": 9, "ignore_eos": True},
            "stream": True,
        },
        LIMITS,
    )
    assert (wanted.prompt, wanted.max_tokens, wanted.ignore_eos, wanted.stream) == ((1, 2, 3), 9, True, True)
    text = parse_generate({"text": "t5 t6", "sampling_params": None}, LIMITS)
    assert (text.prompt, text.max_tokens, text.ignore_eos, text.stream) == ((5, 6), 128, False, False)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "Either text, input_ids"),
        ({"text": "a", "input_ids": [1]}, "Either text, input_ids"),
        ({"input_ids": [[1], [2]]}, "one prompt a request"),
        ({"text": ["a", "b"]}, "one prompt a request"),
        ({"input_ids": []}, "must not be empty"),
        ({"input_ids": [1000]}, "1000, which is out of the vocabulary"),
        ({"input_ids": [-1, 5]}, "-1, which is out of the vocabulary"),
        (
            {"input_ids": [1], "sampling_params": {"max_new_tokens": 1024}},
            "total of 1025 tokens: 1 tokens from",
        ),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens must be at least 1"),
        ({"input_ids": [1], "sampling_params": {"n": 2}}, "only n=1"),
        ({"input_ids": [1], "sampling_params": {"stop": ["x"]}}, "sampling_params.stop"),
        ({"input_ids": [1], "sampling_params": [{}, {}]}, "must be an object"),
    ],
)
def test_what_generate_refuses(body: dict[str, object], says: str) -> None:
    with pytest.raises(Refused, match=says) as caught:
        parse_generate(body, LIMITS)
    assert caught.value.status == 400


def test_the_context_may_be_filled_to_the_last_token() -> None:
    assert (
        parse_generate({"input_ids": [1], "sampling_params": {"max_new_tokens": 1023}}, LIMITS).max_tokens
        == 1023
    )


@pytest.mark.parametrize("incremental", [False, True])
@given(tokens=st.lists(st.integers(0, 999), min_size=1, max_size=20))
def test_a_reader_of_generate_gets_every_token_once(incremental: bool, tokens: list[int]) -> None:
    said = [*map(GenerateReader(), events(GenerateWriter(head(), incremental=incremental), tokens))]
    assert [token for event in said for token in event.token_ids] == tokens
    assert "".join(event.text for event in said) == "".join(f" t{token}" for token in tokens)
    assert [event.completion_tokens for event in said] == [*range(1, len(tokens) + 1)]
    assert [event.finish_reason for event in said] == [None] * (len(tokens) - 1) + ["length"]
    assert {event.prompt_tokens for event in said} == {3}


def test_events_of_generate_repeat_everything_unless_increments_are_asked_for() -> None:
    grown = events(GenerateWriter(head()))
    assert [event["output_ids"] for event in grown] == [TOKENS[:n] for n in range(1, 5)]
    assert all(after["text"].startswith(before["text"]) for before, after in pairwise(grown))
    assert grown[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    assert grown[0]["meta_info"]["id"] == "r1"
    new = events(GenerateWriter(head(), incremental=True))
    assert [event["output_ids"] for event in new] == [[token] for token in TOKENS]


def test_a_whole_answer_of_generate() -> None:
    body = orjson.loads(GenerateWriter(head()).whole(TOKENS, "stop", None))
    assert body["output_ids"] == TOKENS
    assert body["text"] == " t7 t300 t7 t999"
    assert body["meta_info"]["completion_tokens"] == 4
    assert body["meta_info"]["finish_reason"]["type"] == "stop"


def test_a_failure_reaches_a_reader_of_generate() -> None:
    writer = GenerateWriter(head())
    writer.problem = "KV is gone"
    (event,) = parsed(writer.error())
    assert GenerateReader()(event).error == "abort: KV is gone"
    assert orjson.loads(writer.refusal()) == {"detail": "KV is gone"}


@pytest.mark.parametrize("api", ["completion", "chat"])
@pytest.mark.parametrize("ids", [False, True])
def test_a_reader_of_openai_bodies_gets_every_token(api: Api, ids: bool) -> None:
    writer = OpenAiWriter(head(api, include_usage=True, return_token_ids=ids))
    said = [read_openai(event) for event in events(writer)]
    carrying = [event for event in said if event.carries]
    assert "".join(event.text for event in said) == " t7 t300 t7 t999"
    assert [token for event in said for token in event.token_ids] == (TOKENS if ids else [])
    assert len(carrying) == 4, "neither the role nor the usage is a token"
    assert said[-1].completion_tokens == 4
    assert said[-1].has_choices is False
    assert carrying[-1].finish_reason == "length"
    whole = read_openai(orjson.loads(writer.whole(TOKENS, "length", None)))
    assert (whole.text, whole.completion_tokens) == (" t7 t300 t7 t999", 4)
    assert whole.token_ids == (tuple(TOKENS) if ids else ())


def test_running_usage_and_none_at_all() -> None:
    running = events(OpenAiWriter(head(include_usage=True, continuous_usage=True)))
    assert [event["usage"]["completion_tokens"] for event in running] == [1, 2, 3, 4, 4]
    plain = events(OpenAiWriter(head()))
    assert len(plain) == 4
    assert {event["usage"] for event in plain} == {None}


def test_errors_are_flat_on_openai_routes_and_nested_on_generate() -> None:
    writer = OpenAiWriter(head())
    writer.problem = "gone"
    (event,) = parsed(writer.error())
    assert read_openai(event).error == "500 INTERNAL_SERVER_ERROR: gone"
    assert orjson.loads(writer.refusal())["object"] == "error"
    assert orjson.loads(refusal_body("chat", 400, "no", "BadRequestError", "p")) == {
        "object": "error",
        "message": "no",
        "type": "BadRequestError",
        "param": "p",
        "code": 400,
    }
    assert orjson.loads(refusal_body("generate", 400, "no", "x", None)) == {"error": {"message": "no"}}
