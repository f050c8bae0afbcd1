"""Requests under way: what they take from a stream, and what they call it."""

from __future__ import annotations

import pytest

from pytest_pdperf.stack.flights import Flight


def flight(*events: dict[str, object], status: int = 200, whole: bool = True, output: int = 3) -> Flight:
    made = Flight((1, 2), output)
    made.status, made.whole, made.ended_s = status, whole, 1.0
    for event in events:
        made.take(event)
    return made


def token(*ids: int) -> dict[str, object]:
    return {"id": "cmpl-7", "choices": [{"token_ids": list(ids)}]}


USAGE: dict[str, object] = {"choices": [], "usage": {"completion_tokens": 3}}


def test_a_complete_answer_has_every_token_and_its_end() -> None:
    good = flight(token(5), token(6, 7), USAGE)
    assert (good.tokens, good.id, good.complete, good.words()) == ([5, 6, 7], "cmpl-7", True, "complete")


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (flight(token(5), USAGE, whole=False), "ended after 1 of 3 tokens as if all were well"),
        (
            flight(token(5), {"usage": {"completion_tokens": 1}}),
            "ended after 1 of 3 tokens as if all were well",
        ),
        (flight(token(5, 6, 7), USAGE, status=206), "ended after 3 of 3 tokens as if all were well"),
        (
            flight(token(5), {"error": {"code": 500}}, USAGE),
            'HTTP 200, then an error in the stream: {"code": 500}',
        ),
    ],
    ids=["no end", "short", "strange status", "error in a 200"],
)
def test_anything_less_is_not_complete(broken: Flight, words: str) -> None:
    assert not broken.complete
    assert broken.words() == words


def test_sglang_repeats_its_tokens_or_does_not() -> None:
    def event(ids: list[int], count: int) -> dict[str, object]:
        return {"output_ids": ids, "meta_info": {"id": "a", "completion_tokens": count}}

    repeating = flight(event([5], 1), event([5, 6], 2), event([5, 6, 7], 3))
    incremental = flight(event([5], 1), event([6], 2), event([7], 3))
    assert repeating.tokens == incremental.tokens == [5, 6, 7]
    assert repeating.complete and incremental.complete


def test_sglang_tells_of_an_abort_in_its_finish_reason() -> None:
    reason = {"type": "abort", "message": "KVTransferError", "status_code": 500}
    gone = flight({"output_ids": [], "meta_info": {"completion_tokens": 3, "finish_reason": reason}})
    assert not gone.complete
    assert gone.words() == "HTTP 200, then aborted: KVTransferError"


def test_one_that_the_client_left_says_so() -> None:
    gone = flight(token(5), whole=False)
    gone.left = True
    assert gone.words() == "left by the client after 1 tokens"
    gone.ended_s = None
    assert gone.words() == "still open after 1 tokens"
