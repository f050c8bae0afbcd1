"""The event parser against its specification and against itself under any cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.load.sse import Event, SseParser, says_done


def parse(*chunks: bytes) -> list[Event]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


@pytest.mark.parametrize("eol", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
def test_line_ends(eol: bytes) -> None:
    raw = eol.join([b"data: a", b"data: b", b"", b"event: x", b"data:c", b"", b""])
    first, second = parse(raw)
    assert (first.kind, first.data) == ("message", b"a\nb")
    assert (second.kind, second.data) == ("x", b"c")


def test_end_is_the_first_byte_of_the_blank_line() -> None:
    (event,) = parse(b"data: a\r\n\r\n")
    assert event.end == len(b"data: a\r\n\r")
    (event,) = parse(b"data: a\n\n")
    assert event.end == len(b"data: a\n\n")


@pytest.mark.parametrize(
    "raw",
    [
        b": comment\n\n",
        b"data:\n\n",
        b"data: \n\n",
        b"event: ping\ndata:\n\n",
        b"id: 3\n\n",
        b"retry: 9\n\n",
        b"\n\n",
    ],
)
def test_nothing_to_dispatch(raw: bytes) -> None:
    assert parse(raw) == []


def test_one_blank_after_the_colon_is_dropped_and_no_more() -> None:
    assert [e.data for e in parse(b"data:a\n\ndata: a\n\ndata:  a\n\n")] == [b"a", b"a", b" a"]


def test_field_without_colon_and_unknown_fields() -> None:
    assert [e.data for e in parse(b"data\nnonsense: 1\ndata: a\n\n")] == [b"\na"]


def test_kind_does_not_outlive_its_event() -> None:
    assert [e.kind for e in parse(b"event: a\ndata: 1\n\ndata: 2\n\n")] == ["a", "message"]


def test_byte_order_mark_only_at_the_start() -> None:
    assert [e.data for e in parse(b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n")] == [b"a"]
    assert [e.data for e in parse(b"\xef", b"\xbb", b"\xbfdata: a\n\n")] == [b"a"]
    assert parse(b"\xef\xbb", b"Xdata: a\n\n") == []


def test_rest_is_what_lacks_its_blank_line() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\n\ndata: [DONE]") != []
    rest = parser.rest()
    assert rest is not None and rest.data == b"[DONE]" and rest.end == 21
    assert SseParser().rest() is None


PIECES = st.sampled_from(
    [
        b"data: x",
        b"data:",
        b"data: \xc3\xa9",
        b": c",
        b"event: e",
        b"id: 1",
        b"\n",
        b"\r\n",
        b"\r",
        b"\n\n",
        b"\xef\xbb\xbf",
    ]
)


@given(st.lists(PIECES, max_size=30), st.lists(st.integers(0, 200), max_size=20))
def test_any_cut_gives_the_same_events(pieces: list[bytes], cuts: list[int]) -> None:
    raw = b"".join(pieces)
    edges = sorted({0, len(raw), *(min(c, len(raw)) for c in cuts)})
    assert parse(*(raw[a:b] for a, b in pairwise(edges))) == parse(raw)


@given(st.lists(PIECES, max_size=30))
def test_an_event_is_dispatched_by_the_very_byte_it_names(pieces: list[bytes]) -> None:
    raw = b"".join(pieces)
    events = parse(raw)
    parser = SseParser()
    bytewise = [(i + 1, e) for i in range(len(raw)) for e in parser.feed(raw[i : i + 1])]
    assert [e for _, e in bytewise] == events
    assert all(at == e.end for at, e in bytewise)


@pytest.mark.parametrize(
    ("body", "done"),
    [
        (b"data: [DONE]", True),
        (b"data: [DONE]\n\n", True),
        (b'data: {"a": [1]}\n\ndata:[DONE]\r\n\r\n', True),
        (b"data: a\rdata: [DONE] ", True),
        (b"", False),
        (b"data: [DONE", False),
        (b'data: {"text": "data: [DONE]"}\n\n', False),
        (b"data: say data: [DONE]\n\n", False),
        (b"data: " + b"x" * 40 + b"data: [DONE]", False),
        (b"data: [1]\n\n", False),
    ],
)
def test_the_end_mark_is_known_however_it_is_cut(body: bytes, done: bool) -> None:
    """Whole, in two pieces or byte by byte: at the piece that completes it at the latest, and never elsewhere."""
    cuts = [[body]] if body else [[]]
    cuts += [[body[:i], body[i:]] for i in range(1, len(body))]
    cuts.append([body[i : i + 1] for i in range(len(body))])
    for pieces in cuts:
        so_far = [says_done(pieces[: i + 1]) for i in range(len(pieces))]
        assert any(so_far) is done, pieces


def test_what_follows_the_end_mark_is_no_end() -> None:
    assert not says_done([b"data: [DONE]\n\ndata: a\n\n"])
