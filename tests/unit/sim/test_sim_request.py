"""Request bodies: what is understood, and what is refused with which words."""

from __future__ import annotations

import json

import pytest

from pytest_pdperf.engines.sim.request import Limits, Refused, Wanted, parse_request, tokens_of
from pytest_pdperf.engines.sim.stream import Api

LIMITS = Limits(served_model="m", max_model_len=100, vocabulary=1000)


def parse_body(api: Api, body: dict[str, object]) -> Wanted:
    given: dict[str, object] = {"prompt": [1, 2, 3]} if api == "completion" else {}
    return parse_request(api, json.dumps(given | body).encode(), LIMITS)


def parse(api: Api = "completion", **body: object) -> Wanted:
    return parse_body(api, body)


def test_defaults_are_those_of_vllm() -> None:
    wanted = parse()
    assert wanted.prompt == (1, 2, 3)
    assert wanted.max_tokens == 16
    assert not wanted.stream and not wanted.ignore_eos and not wanted.return_token_ids
    assert wanted.kv == {}
    chat = parse("chat", messages=[{"role": "user", "content": "a b"}])
    assert len(chat.prompt) == 4
    assert chat.max_tokens == 96


def test_what_the_router_adds_changes_nothing() -> None:
    added: dict[str, object] = {
        "echo": False,
        "no_stop_trim": False,
        "skip_special_tokens": True,
        "return_hidden_states": False,
        "logprobs": False,
        "separate_reasoning": True,
        "unknown_field": 1,
    }
    assert parse_body("completion", added) == parse()


def test_prompts_may_be_ids_or_text_alone_or_in_a_list_of_one() -> None:
    assert parse(prompt=[[4, 5]]).prompt == (4, 5)
    assert len(parse(prompt="three little words").prompt) == 3
    assert parse(prompt=["a b"]).prompt == parse(prompt="a b").prompt


def test_chat_content_in_parts_and_limits_under_both_names() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    one = parse("chat", messages=[{"role": "user", "content": parts}], max_completion_tokens=5)
    assert one.prompt == parse("chat", messages=[{"role": "user", "content": "a b"}]).prompt
    assert one.max_tokens == 5
    assert parse("chat", messages=[{"role": "user", "content": "a"}], max_tokens=6).max_tokens == 6
    other = parse("chat", messages=[{"role": "system", "content": "a"}])
    assert other.prompt != parse("chat", messages=[{"role": "user", "content": "a"}]).prompt


def test_options_of_a_stream() -> None:
    wanted = parse(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert wanted.stream and wanted.include_usage and wanted.continuous_usage
    assert not parse(stream=True, stream_options={"continuous_usage_stats": True}).continuous_usage
    assert parse(stream=True, stream_options=None).include_usage is False


def test_the_context_limit_is_exact() -> None:
    assert parse(prompt=[1] * 90, max_tokens=10).max_tokens == 10
    with pytest.raises(Refused) as caught:
        parse(prompt=[1] * 91, max_tokens=10)
    assert caught.value.status == 400
    assert "maximum context length is 100 tokens" in caught.value.message
    assert "prompt contains 91 input tokens, for a total of 101" in caught.value.message


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "other"}, 404, "The model `other` does not exist."),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": []}, 400, "empty"),
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": [1, -1]}, 400, "Token id -1"),
        ({"prompt": [1000]}, 400, "Token id 1000 is out of vocabulary"),
        ({"prompt": [[1], [2]]}, 400, "one prompt"),
        ({"prompt": [1.5]}, 400, "one prompt"),
        ({"prompt": [True]}, 400, "one prompt"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
        ({"max_tokens": 0}, 400, "at least 1"),
        ({"max_tokens": "9"}, 400, "max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, 400, "min_tokens"),
        ({"n": 2}, 400, "n=1"),
        ({"logprobs": 1}, 400, "'logprobs'"),
        ({"echo": True}, 400, "'echo'"),
        ({"stop": ["x"]}, 400, "'stop'"),
        ({"stream_options": {"include_usage": True}}, 400, "stream=True"),
        ({"stream": True, "stream_options": [1]}, 400, "stream_options"),
        ({"kv_transfer_params": [1]}, 400, "kv_transfer_params"),
    ],
)
def test_refusals(body: dict[str, object], status: int, said: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_body("completion", body)
    assert caught.value.status == status
    assert said in caught.value.message


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"text"', b"\xff"])
def test_bodies_that_are_no_object(raw: bytes) -> None:
    with pytest.raises(Refused) as caught:
        parse_request("completion", raw, LIMITS)
    assert caught.value.status == 400


@pytest.mark.parametrize("messages", [None, [], "hi", [1]])
def test_bad_messages(messages: object) -> None:
    with pytest.raises(Refused) as caught:
        parse("chat", messages=messages)
    assert caught.value.status == 400


def test_tokenizing_follows_the_same_rules() -> None:
    messages = [{"role": "user", "content": "a b"}]
    assert tokens_of({"messages": messages}, LIMITS) == parse("chat", messages=messages).prompt
    assert tokens_of({"prompt": "a b"}, LIMITS) == parse(prompt="a b").prompt
