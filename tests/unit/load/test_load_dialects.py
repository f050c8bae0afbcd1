"""What single events say, one API after the other."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_pdperf.load.dialects import GenerateReader, error_of, read_openai


def chat(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


@pytest.mark.parametrize(
    ("data", "text", "carries"),
    [
        (chat(content="a"), "a", True),
        (chat(role="assistant", content=""), "", False),
        (chat(content=None), "", False),
        (chat(reasoning_content="r"), "r", True),
        (chat(reasoning="r", content="a"), "ra", True),
        (chat(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": ""}}]), "", True),
        (chat(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]), "", True),
        (chat(tool_calls=[{"index": 0, "function": {"arguments": ""}}]), "", False),
        (chat(tool_calls=[{"index": 0}, "odd"]), "", False),
        (chat(tool_calls=[]), "", False),
        (chat(tool_calls="odd"), "", False),
        (chat(refusal="No"), "No", True),
        (chat(function_call={"name": "f"}), "", True),
        ({"choices": [{"message": {"content": "whole"}}]}, "whole", True),
        ({"choices": [{"text": "a"}]}, "a", True),
        ({"choices": [{"text": "", "token_ids": [4]}]}, "", True),
        ({"choices": [{"delta": "odd", "text": "a"}]}, "a", True),
        ({"choices": [{"text": "a"}, {"text": "b"}]}, "ab", True),
        ({"choices": []}, "", False),
        ({"choices": "odd"}, "", False),
    ],
)
def test_openai_content(data: dict[str, Any], text: str, carries: bool) -> None:
    said = read_openai(data)
    assert (said.text, said.carries) == (text, carries)
    assert said.has_choices == (isinstance(data["choices"], list) and bool(data["choices"]))


@pytest.mark.parametrize(
    ("count", "read"), [(7, 7), (0, 0), (-1, None), (True, None), (7.0, None), ("7", None), (None, None)]
)
def test_counts_are_whole_numbers_or_nothing(count: object, read: int | None) -> None:
    usage = {"prompt_tokens": count, "completion_tokens": count}
    said = read_openai({"choices": [], "usage": usage})
    assert (said.prompt_tokens, said.completion_tokens) == (read, read)
    assert read_openai({"usage": None}).completion_tokens is None


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"error": {"message": "no\n memory", "code": 500, "type": "X"}}, "500 X: no memory"),
        ({"error": {"message": "plain"}}, "plain"),
        ({"error": {"code": 3}}, "3: {'code': 3}"),
        ({"error": "text"}, "text"),
        ({"error": None}, None),
        ({"error": {}}, None),
        ({"object": "error", "message": "old style"}, "old style"),
        ({"object": "chunk", "message": "none"}, None),
    ],
)
def test_errors(data: dict[str, Any], line: str | None) -> None:
    assert error_of(data) == line


@pytest.mark.parametrize(
    ("choice", "reason", "error"),
    [
        ({"finish_reason": "stop"}, "stop", None),
        ({"finish_reason": "error"}, "error", "finish_reason error: without a message"),
        ({"finish_reason": "error", "error": {"code": 502, "message": "gone"}}, "error", "502: gone"),
        ({"finish_reason": {"type": "abort", "message": "no partner"}}, "abort", "abort: no partner"),
        ({"finish_reason": {"odd": 1}}, "{'odd': 1}", None),
    ],
)
def test_how_a_choice_ends(choice: dict[str, Any], reason: str, error: str | None) -> None:
    said = read_openai({"choices": [choice]})
    assert (said.finish_reason, said.error) == (reason, error)


def gen(
    text: str | None = None, count: int | None = None, ids: list[int] | None = None, finish: object = None
) -> dict[str, Any]:
    data: dict[str, Any] = {
        "meta_info": {"prompt_tokens": 6, "completion_tokens": count, "finish_reason": finish}
    }
    return (
        data | ({"text": text} if text is not None else {}) | ({"output_ids": ids} if ids is not None else {})
    )


def test_generate_text_so_far() -> None:
    reader = GenerateReader()
    assert [reader(gen(t, i + 1)).text for i, t in enumerate(("the", "the cat", "the cat"))] == [
        "the",
        " cat",
        "",
    ]
    assert not reader(gen("the cat", 3)).carries


def test_generate_increments_told_by_ids_even_where_text_repeats() -> None:
    """A token that says again what the last one said is new text when the ids say so."""
    reader = GenerateReader()
    events = [gen("na", 1, [5]), gen("na", 2, [5]), gen("nana", 4, [5, 5])]
    said = [reader(event) for event in events]
    assert [s.text for s in said] == ["na", "na", "nana"]
    assert [s.token_ids for s in said] == [(5,), (5,), (5, 5)]


def test_generate_everything_so_far_told_by_ids() -> None:
    reader = GenerateReader()
    said = [reader(gen("na", 1, [5])), reader(gen("nana", 2, [5, 5]))]
    assert [s.text for s in said] == ["na", "na"]
    assert [s.token_ids for s in said] == [(5,), (5,)]


def test_generate_ids_without_a_count() -> None:
    reader = GenerateReader()
    said = [reader(gen(None, None, ids)) for ids in ([5], [5, 6], [7])]
    assert [s.token_ids for s in said] == [(5,), (6,), (7,)]
    assert all(s.carries for s in said)


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([gen("caf\ufffd", 2), gen("café", 3), gen("café!", 4)], ["caf\ufffd", "é", "!"]),
        ([gen("caf\ufffd", 2, [1, 2]), gen("café", 3, [1, 2, 3])], ["caf\ufffd", "é"]),
        ([gen("abc", 3), gen("ab", 2), gen("abd", 3)], ["abc", "", "d"]),
        ([gen("a"), gen("ab"), gen("ac")], ["a", "b", "c"]),
    ],
)
def test_generate_mends_the_end_of_what_it_said(events: list[dict[str, Any]], text: list[str]) -> None:
    """A character that was not whole yet, or tokens that were retracted: the answer is the last text, not a pile."""
    reader = GenerateReader()
    said = [reader(event) for event in events]
    assert [s.text for s in said] == text
    whole = ""
    for one in said:
        whole = whole[: one.keeps] + one.text
    assert whole == events[-1]["text"] == reader.text


def test_generate_ends() -> None:
    assert GenerateReader()(gen("a", 1, finish={"type": "length", "length": 1})).finish_reason == "length"
    assert GenerateReader()(gen("a", 1, finish="stop")).finish_reason == "stop"
    assert GenerateReader()(gen("a", 1)).finish_reason is None
    aborted = GenerateReader()(gen("a", 1, finish={"type": "abort", "message": "no\npartner"}))
    assert (aborted.finish_reason, aborted.error) == ("abort", "abort: no partner")
    quiet = GenerateReader()(gen("a", 1, finish={"type": "abort"}))
    assert (quiet.finish_reason, quiet.error) == ("abort", None)
    stopped = GenerateReader()(gen("a", 1, finish={"type": "stop", "message": "fine"}))
    assert stopped.error is None


def test_generate_accounting_alone_is_no_token() -> None:
    assert GenerateReader()({"error": {"message": "gone"}}).error == "gone"
    assert not GenerateReader()({"error": {"message": "gone"}}).has_choices
    assert GenerateReader()({"text": "a"}).has_choices
    assert GenerateReader()(gen(None, 1)).has_choices
