"""An answer counts by what it holds: tokens, not a status."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import httpx
import pytest

from pytest_pdperf.probing import parts_at_a_tie
from pytest_pdperf.stack import greedy
from pytest_pdperf.stack.greedy import Answer, ProbeError, ask, body_of, logprob_gap
from pytest_pdperf.stack.running import Serving


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


def gap(
    monkeypatch: pytest.MonkeyPatch,
    respond: Callable[[httpx.Request], httpx.Response],
    a: list[int],
    b: list[int],
) -> float | None:
    monkeypatch.setattr(greedy, "client", lambda: httpx.Client(transport=httpx.MockTransport(respond)))
    return logprob_gap("http://x", "m", [1, 2], a, b)


def likely(**values: float) -> Callable[[httpx.Request], httpx.Response]:
    listed = {name.replace("token_", "token_id:"): value for name, value in values.items()}
    return body({"choices": [{"logprobs": {"top_logprobs": [listed]}}]})


def test_two_answers_are_compared_by_likelihood_where_they_part(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def respond(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return likely(token_7=-0.70, token_8=-0.75)(request)

    assert gap(monkeypatch, respond, [5, 7, 1], [5, 8, 2]) == pytest.approx(0.05)
    assert asked[0]["prompt"] == [1, 2, 5], "what both share comes first"
    assert (asked[0]["max_tokens"], asked[0]["temperature"]) == (1, 0.0)
    assert gap(monkeypatch, respond, [5, 8], [5, 7]) == pytest.approx(0.05)


def test_a_gap_that_is_not_known_is_none_and_never_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    known = likely(token_7=-0.7)
    assert gap(monkeypatch, known, [7], [7]) is None
    assert gap(monkeypatch, known, [7], [8]) is None, "not among the likeliest"
    assert gap(monkeypatch, body({"choices": [{"logprobs": None}]}), [7], [8]) is None
    with pytest.raises(ProbeError, match="HTTP 500"):
        gap(monkeypatch, body({"error": "x"}, 500), [7], [8])


def test_a_tie_is_forgiven_up_to_the_limit_and_only_where_one_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    respond = likely(token_7=-0.70, token_8=-0.75)
    monkeypatch.setattr(greedy, "client", lambda: httpx.Client(transport=httpx.MockTransport(respond)))
    stack = cast(Serving, SimpleNamespace(url="http://x", model="m"))
    assert parts_at_a_tie(stack, 4, [7], [8], 0.1)
    assert not parts_at_a_tie(stack, 4, [7], [8], 0.01)
    assert not parts_at_a_tie(stack, 4, [7], [9], 0.1), "damaged KV picks a token that is not likely at all"
    monkeypatch.setattr(greedy, "client", lambda: pytest.fail("nobody asks without a limit"))
    assert not parts_at_a_tie(stack, 4, [7], [8], 0.0)
