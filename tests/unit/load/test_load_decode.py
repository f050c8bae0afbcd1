"""Bytes and stamps to records: the same events in any cut, each stamped with the read that completed it."""

from __future__ import annotations

import json
from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.load.decode import Expect, quote, read_answer, to_record
from pytest_pdperf.load.exchange import End, Exchange
from pytest_pdperf.load.target import Api
from pytest_pdperf.measure.records import RequestRecord, Status

LENIENT = Expect(ignore_eos=False, check_prompt=False)


def event(text: str | None, *, finish: str | None = None, usage: tuple[int, int] | None = None) -> bytes:
    data: dict[str, Any] = {"choices": [] if text is None else [{"text": text, "finish_reason": finish}]}
    if usage is not None:
        data["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
ANSWER = (
    b": hello\n\n"
    + event("ré")
    + event("sumé", usage=(3, 3))
    + event("", usage=(3, 4))
    + event("!", finish="length", usage=(3, 5))
    + event(None, usage=(3, 5))
    + DONE
)


def exchange(body: bytes, cuts: list[int] | None = None, **changes: Any) -> Exchange:
    """An exchange whose i-th read ends at the i-th cut and is stamped 1000 * (i + 1), seen 7 ns later."""
    made = Exchange("main", 0, False, 3, 5, status=200, end=End.COMPLETE, sent_ns=100, end_ns=9_000_000)
    for i, cut in enumerate(cuts or [len(body)]):
        made.size = cut
        made.mark(1000 * (i + 1), 1000 * (i + 1) + 7)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def record(
    body: bytes, *, expect: Expect = LENIENT, api: Api = "completions", **changes: Any
) -> RequestRecord:
    return to_record(exchange(body, **changes), body, api, expect)


KEYS = "choices usage error text delta meta_info message finish_reason completion_tokens tool_calls"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.lists(st.integers(1, len(ANSWER) - 1), max_size=40))
def test_any_cut_gives_the_same_record_but_for_its_stamps(cuts: list[int]) -> None:
    edges = sorted({*cuts, len(ANSWER)})
    whole = record(ANSWER)
    cut = record(ANSWER, cuts=edges)
    for name in (
        "status",
        "text",
        "event_tokens",
        "output_tokens",
        "prompt_tokens",
        "finish_reason",
        "error",
    ):
        assert getattr(cut, name) == getattr(whole, name)
    ends = read_answer(ANSWER, "completions").event_end
    assert cut.event_ns == tuple(1000 * (bisect_left(edges, end) + 1) for end in ends)
    assert set(cut.event_lag_ns) == {7}


@given(st.binary(max_size=200), st.sampled_from(["completions", "chat", "generate"]))
def test_no_body_breaks_it(body: bytes, api: Api) -> None:
    assert record(body, api=api).status in Status


@given(JSON)
def test_no_json_breaks_it(data: object) -> None:
    body = b"data: " + json.dumps(data).encode() + b"\n\n"
    for api in ("completions", "chat", "generate"):
        assert record(body, api=api).status in Status


def test_the_whole_answer() -> None:
    found = record(ANSWER, cuts=[15, 60, len(ANSWER)], expect=Expect())
    assert (found.status, found.error) == (Status.OK, "")
    assert found.text == "résumé!"
    assert found.event_tokens == (0, 0, 1, 1), "three tokens over two events, one of which nothing counted"
    assert (found.output_tokens, found.token_count_source, found.prompt_tokens) == (5, "usage", 3)


def test_usage_on_events_without_choices_is_no_token() -> None:
    assert record(event(None, usage=(3, 4)) + DONE).status is Status.EMPTY


def test_end_is_done_not_the_close() -> None:
    assert record(ANSWER, cuts=[len(ANSWER) - 1, len(ANSWER)]).end_ns == 2000
    assert record(event("a", finish="stop")).end_ns == 9_000_000


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"end": End.TIMEOUT}, Status.TIMEOUT),
        ({"end": End.RESET}, Status.RESET),
        ({"end": End.TOO_LARGE}, Status.PARSE_ERROR),
        ({"end": End.EOF}, Status.TRUNCATED),
        ({"end": End.CONNECT, "status": None}, Status.CONNECT_ERROR),
        ({"end": End.NOT_SENT, "status": None}, Status.CONNECT_ERROR),
        ({"end": End.EOF, "status": None}, Status.RESET),
        ({"status": 503}, Status.HTTP_ERROR),
    ],
)
def test_transport_faults(change: dict[str, Any], status: Status) -> None:
    found = record(event("a"), **change)
    assert found.status is status
    assert found.error


def test_an_announced_error_explains_more_than_the_reset_after_it() -> None:
    found = record(b'data: {"error":"gone"}\n\n', end=End.RESET)
    assert (found.status, found.error) == (Status.ERROR_IN_STREAM, "gone")


def test_reset_after_done_is_a_success() -> None:
    assert record(ANSWER, end=End.RESET).status is Status.OK


@pytest.mark.parametrize(("planned", "status"), [(5, Status.OK), (6, Status.SHORT), (4, Status.SHORT)])
def test_length_must_be_the_planned_one_either_way(planned: int, status: Status) -> None:
    assert record(ANSWER, output_tokens=planned, expect=Expect()).status is status


def test_prompt_length_must_be_the_planned_one() -> None:
    found = record(ANSWER, input_tokens=4, expect=Expect())
    assert (found.status, found.error) == (
        Status.WRONG_PROMPT_LENGTH,
        "server counted 3 prompt tokens, planned 4",
    )


def test_counts_of_events_do_not_verify_a_length() -> None:
    body = event("a") + event("b", finish="length") + DONE
    assert record(body, output_tokens=2, expect=Expect()).status is Status.OK
    found = record(body, output_tokens=3, expect=Expect())
    assert found.status is Status.SHORT and "no usage" in found.error


def test_one_token_an_event_is_inferred_from_the_total_only_when_they_agree() -> None:
    assert record(event("a") + event("b", finish="stop") + event(None, usage=(3, 2))).event_tokens == (1, 1)
    assert record(event("a") + event("bc", finish="stop") + event(None, usage=(3, 3))).event_tokens == (0, 0)


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        ([("a", None), ("b", None), ("", 2)], (1, 1)),
        ([("a", None), ("b", None), ("c", 3)], (1, 1, 1)),
        ([("a", 1), ("b", None), ("c", 3)], (1, 1, 1)),
        ([("a", 1), ("bc", None), ("def", 6), ("g", 7)], (1, 0, 0, 1)),
        ([("a", None), ("bc", None), ("", 3)], (0, 0)),
        ([("a", 1), ("", 2), ("b", 3)], (1, 1, 1)),
        ([("a", 1), ("b", 1), ("c", 3)], (1, 1, 1)),
    ],
)
def test_a_count_belongs_to_all_that_came_since_the_last(
    said: list[tuple[str, int | None]], tokens: tuple[int, ...]
) -> None:
    """Usage may be null in some events, or come with the closing one alone: that one then holds no token itself."""
    *events, (text, count) = said
    assert count is not None
    body = b"".join(event(t, usage=(3, n) if n else None) for t, n in events)
    found = record(body + event(text, finish="length", usage=(3, count)) + DONE)
    assert (found.event_tokens, found.output_tokens) == (tokens, count)
    assert len(found.event_ns) == len(tokens)


def test_a_token_that_prints_nothing_is_seen_by_what_the_count_has_beyond_the_events() -> None:
    body = event("a") + event("", usage=(3, 2)) + event("b", finish="length", usage=(3, 3)) + DONE
    assert record(body).event_tokens == (1, 1, 1)


@pytest.mark.parametrize("reason", ["abort", "cancelled", "error"])
def test_a_finish_that_is_none(reason: str) -> None:
    """Where end-of-sequence is allowed, any reason passes for a finish unless it says that there was none."""
    found = record(event("a", finish=reason) + DONE)
    want = Status.ERROR_IN_STREAM if reason == "error" else Status.ABORTED
    assert (found.status, reason in found.error) == (want, True)


def test_an_error_event_need_not_be_json() -> None:
    found = record(event("a") + b"event: error\ndata: engine is gone\n\n" + DONE)
    assert (found.status, found.error) == (Status.ERROR_IN_STREAM, "engine is gone")


def test_json_as_servers_write_it() -> None:
    """NaN of a log probability and half a surrogate pair spoil no answer; broken JSON does."""
    odd = b'data: {"choices":[{"text":"a\\ud83d","logprobs":[NaN,-Infinity]}]}\n\n'
    found = record(odd + event("b", finish="stop") + DONE)
    assert (found.status, found.text) == (Status.OK, "a\ufffdb")
    assert record(b'data: {"choices":[NaN\n\n').status is Status.PARSE_ERROR


def test_not_streamed() -> None:
    body = b"".join(event(c) for c in "abcd") + event(None, usage=(3, 4)) + DONE
    assert record(body).not_streamed
    assert not record(body, cuts=[len(body) // 2, len(body)]).not_streamed


def test_many_tokens_over_several_segments_at_impossible_speed_are_not_streamed() -> None:
    pieces = [event("x") for _ in range(40)]
    edges = [sum(map(len, pieces[: i + 1])) for i in range(40)]
    made = exchange(b"".join(pieces), cuts=edges)
    assert to_record(made, b"".join(pieces), "completions", LENIENT).not_streamed
    for i in range(40):
        made.marks[3 * i + 1] = 25_000 * (i + 1)
    assert not to_record(made, b"".join(pieces), "completions", LENIENT).not_streamed


def test_answer_that_is_no_stream() -> None:
    found = record(b"<html><title>Bad gateway</title></html>", headers={"content-type": "text/html"})
    assert found.status is Status.PARSE_ERROR
    assert found.error == "200 without an event stream (text/html): <html><title>Bad gateway</title></html>"
    plain = b'{"choices":[{"text":"abc","finish_reason":"length"}],"usage":{"prompt_tokens":3,"completion_tokens":5}}'
    found = record(plain, expect=Expect())
    assert (found.status, found.not_streamed, found.output_tokens) == (Status.OK, True, 5)
    assert record(b'{"object":"error","message":"no such model"}').status is Status.ERROR_IN_STREAM


def test_http_errors_quote_what_helps() -> None:
    found = record(b"busy", status=429, headers={"retry-after": "7"})
    assert found.error == "HTTP 429, Retry-After: 7: busy"
    found = record(b"", status=307, headers={"location": "http://elsewhere/"})
    assert found.error == "HTTP 307, Location: http://elsewhere/ without a body"


@given(st.binary(max_size=400))
def test_quotes_are_one_printable_line(raw: bytes) -> None:
    line = quote(raw)
    assert line.isprintable()
    assert len(line) < 900


def test_generate_ids_repeat_or_grow() -> None:
    def gen(ids: list[int], count: int) -> bytes:
        data = {"text": "", "output_ids": ids, "meta_info": {"completion_tokens": count}}
        return b"data: " + json.dumps(data).encode() + b"\n\n"

    repeated = record(gen([1], 1) + gen([1, 2], 2) + gen([1, 2, 1], 3), api="generate")
    assert repeated.token_ids == (1, 2, 1)
    grown = record(gen([1], 1) + gen([2, 3], 3), api="generate")
    assert grown.token_ids == (1, 2, 3)
    assert grown.event_tokens == (1, 2)


@pytest.mark.parametrize(
    ("usage", "chunks", "count", "source"),
    [(100, 100, 100, "usage"), (None, 50, 50, "chunks"), (128, 1, 128, "usage"), (100, 25, 100, "usage")],
)
def test_where_counts_disagree_the_servers_own_wins(
    usage: int | None, chunks: int, count: int, source: str
) -> None:
    """One event that claims 128 tokens is counted, and shows no time between them."""
    pieces = [event("t", finish="length" if i == chunks - 1 else None) for i in range(chunks)]
    edges = [sum(map(len, pieces[: i + 1])) for i in range(chunks)]
    body = b"".join(pieces) + (event(None, usage=(3, usage)) if usage else b"")
    made = exchange(body, cuts=[*edges, len(body)])
    for i in range(chunks):
        made.marks[3 * i + 1] = 30_000_000 * (i + 1)
    found = to_record(made, body, "completions", LENIENT)
    assert (found.output_tokens, found.token_count_source) == (count, source)
    assert found.not_streamed == (chunks == 1)


def test_nothing_after_the_end_mark_or_a_broken_event_is_read() -> None:
    late = event("zzz") + b'data: {"error":"late"}\n\n'
    assert (record(ANSWER + late).text, record(ANSWER + late).status) == ("résumé!", Status.OK)
    broken = record(event("a") + b"data: {\n\n" + late)
    assert (broken.text, broken.status) == ("a", Status.PARSE_ERROR)


def test_the_first_error_is_the_one_that_is_told() -> None:
    found = record(b'data: {"error":"first"}\n\ndata: {"error":"second"}\n\n' + event("a"))
    assert (found.status, found.error) == (Status.ERROR_IN_STREAM, "first")
