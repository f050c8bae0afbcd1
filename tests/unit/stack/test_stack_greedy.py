"""An answer counts by what it holds: tokens, not a status."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from pytest_pdperf.stack.greedy import Answer, ask, body_of


def answer(
    respond: Callable[[httpx.Request], httpx.Response],
    *,
    form: str = "token_ids",
    stream: bool = True,
    want: int = 2,
) -> Answer:
    path, body = body_of("m", [1, 2, 3], want, form=form, stream=stream)
    with httpx.Client(transport=httpx.MockTransport(respond)) as http:
        return ask(http, "http://x", path, body, want=want, timeout_s=1.0)


def sse(*events: object, done: bool = True) -> Callable[[httpx.Request], httpx.Response]:
    text = "".join(f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n" for e in events)
    return lambda request: httpx.Response(
        200, text=": ping\n\n" + text + ("data: [DONE]\n\n" if done else "")
    )


def body(data: object, status: int = 200) -> Callable[[httpx.Request], httpx.Response]:
    return lambda request: httpx.Response(status, json=data)


def token(*ids: int) -> dict[str, object]:
    return {"id": "cmpl-1", "choices": [{"text": "x" * len(ids), "token_ids": list(ids)}]}


USAGE = {"id": "cmpl-1", "choices": [], "usage": {"completion_tokens": 2}}


def test_a_complete_stream() -> None:
    got = answer(sse(token(7), token(9), USAGE))
    assert got == Answer("cmpl-1", (7, 9), "xx", 2, "", None)


def test_a_complete_body_with_transfer_parameters() -> None:
    got = answer(
        body({**token(7, 9), "usage": {"completion_tokens": 2}, "kv_transfer_params": {"a": 1}}), stream=False
    )
    assert (got.error, got.tokens, got.kv_transfer_params) == ("", (7, 9), {"a": 1})


def test_token_ids_are_optional_and_so_is_usage() -> None:
    assert answer(sse({"choices": [{"text": "hi"}]})).error == ""


@pytest.mark.parametrize(
    ("respond", "want"),
    [
        (sse({"error": {"message": "Internal server error"}}), "error in the answer"),
        (sse(token(7), {"error": {"message": "late"}}), "late"),
        (sse(token(7), {"choices": [], "usage": {"completion_tokens": 1}}), "1 tokens came instead of 2"),
        (sse(), "without any token"),
        (sse("{not json"), "JSONDecodeError"),
        (body({"error": "x"}, 503), "HTTP 503"),
        (lambda request: httpx.Response(200, text=""), "without any token"),
    ],
)
def test_what_is_no_answer(respond: Callable[[httpx.Request], httpx.Response], want: str) -> None:
    got = answer(respond)
    assert want in got.error
    assert got.tokens == ()


@pytest.mark.parametrize(
    ("raised", "want"),
    [
        (httpx.ConnectError("refused"), "ConnectError: refused"),
        (httpx.ReadTimeout("slow"), "no answer from http://x/v1/completions within 1 s"),
        (httpx.RemoteProtocolError("cut off"), "RemoteProtocolError"),
    ],
)
def test_what_the_network_does_is_an_error_not_an_exception(raised: Exception, want: str) -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        raise raised

    assert want in answer(respond).error
    assert want in answer(respond, stream=False).error


def test_the_request_asks_for_exactly_n_greedy_tokens() -> None:
    sent: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return sse(token(1), token(2), USAGE)(request)

    answer(respond)
    data = json.loads(sent[0].content)
    assert sent[0].url.path == "/v1/completions"
    assert data["prompt"] == [1, 2, 3]
    assert (data["max_tokens"], data["temperature"], data["ignore_eos"]) == (2, 0.0, True)
    assert data["return_token_ids"] is True
    assert data["stream_options"] == {"include_usage": True}
    assert body_of("m", [1, 2], 1, form="text", stream=False)[1]["prompt"] == "1 2"


def test_the_generate_route_of_sglang() -> None:
    sent: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(
            200, json={"text": "ab", "output_ids": [5, 6], "meta_info": {"id": "r1", "completion_tokens": 2}}
        )

    got = answer(respond, form="generate_ids", stream=False)
    assert got == Answer("r1", (5, 6), "ab", 2, "", None)
    assert sent[0].url.path == "/generate"
    data = json.loads(sent[0].content)
    assert data["input_ids"] == [1, 2, 3]
    assert data["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True}


def generated(text: str, ids: list[int], count: int) -> dict[str, object]:
    return {"text": text, "output_ids": ids, "meta_info": {"id": "r", "completion_tokens": count}}


@pytest.mark.parametrize(
    "events",
    [
        [generated(" a", [5], 1), generated(" a a", [5, 5], 2)],
        [generated(" a", [5], 1), generated(" a", [5], 2)],
    ],
    ids=["everything so far", "what is new"],
)
def test_generate_streams_in_two_ways(events: list[dict[str, object]]) -> None:
    got = answer(sse(*events), form="generate_ids")
    assert (got.error, got.tokens, got.text, got.completion_tokens) == ("", (5, 5), " a a", 2)
