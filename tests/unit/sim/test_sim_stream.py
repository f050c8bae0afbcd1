"""The bytes of answers: valid JSON in vLLM's shape, for every combination of what a client may ask to see."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from pytest_pdperf.engines.sim.stream import DONE_EVENT, AnswerHead, Api, EventWriter, whole_answer

MODEL = 'm "100%" \\ ü'
PROMPT = [5, 6, 7]


def head(api: Api = "completion", **options: bool) -> AnswerHead:
    return AnswerHead(api=api, id="cmpl-%s-1", created=17, model=MODEL, prompt=PROMPT, **options)


def events(data: bytes) -> list[Any]:
    """The JSON of each event; [DONE] as that text."""
    assert data.endswith(b"\n\n")
    texts = data.decode().removesuffix("\n\n").split("\n\n")
    assert all(text.startswith("data: ") for text in texts)
    return [text[6:] if text == "data: [DONE]" else json.loads(text[6:]) for text in texts]


@pytest.mark.parametrize("api", ["completion", "chat"])
@pytest.mark.parametrize(("ids", "usage", "continuous"), list(itertools.product([False, True], repeat=3)))
def test_a_whole_stream(api: Api, ids: bool, usage: bool, continuous: bool) -> None:
    writer = EventWriter(head(api, return_token_ids=ids, include_usage=usage, continuous_usage=continuous))
    data = (
        writer.opening()
        + writer.first(11)
        + writer.token(12, 1)
        + writer.last(13, 2, "length")
        + writer.final(3)
    )
    *shown, done = events(data)
    assert done == "[DONE]"
    assert all(
        event["id"] == "cmpl-%s-1" and event["model"] == MODEL and event["created"] == 17 for event in shown
    )
    if usage:
        final = shown.pop()
        assert final["choices"] == []
        assert final["usage"] == {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3}
    if api == "chat":
        opening = shown.pop(0)
        assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert opening.get("prompt_token_ids") == (PROMPT if ids else None)
    assert len(shown) == 3
    for i, event in enumerate(shown):
        assert event["object"] == ("text_completion" if api == "completion" else "chat.completion.chunk")
        (choice,) = event["choices"]
        text = choice["text"] if api == "completion" else choice["delta"]["content"]
        assert text == f" t{11 + i}"
        assert choice["token_ids"] == ([11 + i] if ids else None)
        assert choice["finish_reason"] == ("length" if i == 2 else None)
        assert choice["logprobs"] is None
        if api == "completion":
            assert choice["prompt_token_ids"] == (PROMPT if ids and i == 0 else None)
        expected = {"prompt_tokens": 3, "total_tokens": 4 + i, "completion_tokens": 1 + i}
        assert event.get("usage") == (expected if continuous else None)


def test_completions_have_no_opening() -> None:
    assert EventWriter(head()).opening() == b""


def test_without_usage_only_the_end_mark_is_left() -> None:
    assert EventWriter(head()).final(3) == DONE_EVENT


def test_the_error_event_is_vllms() -> None:
    error, done = events(EventWriter.error())
    assert error == {
        "error": {
            "message": "Internal server error",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
    }
    assert done == "[DONE]"


@pytest.mark.parametrize("api", ["completion", "chat"])
def test_an_answer_in_one_piece(api: Api) -> None:
    params: dict[str, object] = {"remote_port": 1}
    body = json.loads(whole_answer(head(api, return_token_ids=True), [1, 2], "stop", params))
    (choice,) = body["choices"]
    text = choice["text"] if api == "completion" else choice["message"]["content"]
    assert text == " t1 t2"
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == [1, 2]
    assert (choice if api == "completion" else body)["prompt_token_ids"] == PROMPT
    assert body["usage"]["completion_tokens"] == 2
    assert body["usage"]["total_tokens"] == 5
    assert body["kv_transfer_params"] == params
    hidden = json.loads(whole_answer(head(api), [1, 2], "length", None))
    assert hidden["choices"][0]["token_ids"] is None
    assert hidden["kv_transfer_params"] is None
