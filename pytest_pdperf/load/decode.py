"""From bytes and stamps to a request record, after the clock has stopped.

The definitions: a token event carries text, reasoning, a tool-call delta, token ids, or - on an event with
choices - a grown completion count. Role-only, empty and usage-only events are not tokens. Nothing after
`[DONE]` counts.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from pytest_pdperf.measure.records import RequestRecord, Status

from .dialects import GenerateReader, Said, read_openai
from .exchange import End, Exchange
from .sse import Event, SseParser
from .target import Api

SHOWN = 160
"""Bytes of an unexpected answer that an error quotes."""
ABORTS = frozenset({"abort", "aborted", "cancelled", "canceled"})
"""Finish reasons of a request that somebody gave up."""
_HALF_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(slots=True)
class Answer:
    """What the body said, with one entry a token event."""

    event_end: list[int] = field(default_factory=list)
    """Body offset that completed token event i."""
    event_tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    done_end: int | None = None
    """Body offset of `[DONE]`."""
    error: str | None = None
    parse_error: str | None = None
    streamed: bool = False
    """At least one server-sent event with data was seen."""
    counted: int = 0
    """Tokens that the server's running count, or token ids, have told so far."""
    uncounted: list[int] = field(default_factory=list)
    """Token events since then that nothing counted."""


def quote(raw: bytes) -> str:
    """First bytes of an answer on one printable line."""
    shown = raw[:SHOWN].decode("utf-8", "backslashreplace")
    line = "".join(c if c.isprintable() else " " if c.isspace() else f"\\x{ord(c):02x}" for c in shown)
    return " ".join(line.split()) + (f"... ({len(raw)} bytes)" if len(raw) > SHOWN else "")


def read_answer(body: bytes, api: Api) -> Answer:
    """Token events, counts and end marks of a whole response body."""
    parser = SseParser()
    answer = Answer()
    reader = GenerateReader() if api == "generate" else read_openai
    events = parser.feed(body)
    rest = parser.rest()
    for event in events:
        _take(event, answer, reader)
        if answer.done_end is not None or answer.parse_error is not None:
            break
    else:
        if rest is not None and _whole(rest.data):
            _take(rest, answer, reader)
    if not answer.streamed and body.lstrip()[:1] == b"{":
        _take(Event(len(body), "message", body), answer, reader)
        answer.streamed = False
    return answer


def _whole(data: bytes) -> bool:
    """Whether an event that lacks its blank line was cut after its data rather than inside it."""
    if data.strip() == b"[DONE]":
        return True
    try:
        load_json(data)
    except ValueError:
        return False
    return True


def load_json(data: bytes) -> Any:
    """JSON as servers write it: with NaN and Infinity for log probabilities, and halves of surrogate pairs.

    Raises ValueError for what is no JSON either way.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as problem:
        try:
            return _mend(json.loads(data.decode("utf-8")))
        except (ValueError, RecursionError):
            raise problem from None


def _mend(data: Any) -> Any:
    """The same without half surrogate pairs, which cannot be written down again."""
    if isinstance(data, str):
        return _HALF_PAIR.sub("\ufffd", data)
    if isinstance(data, list):
        return [_mend(item) for item in data]
    return {_mend(key): _mend(value) for key, value in data.items()} if isinstance(data, dict) else data


def _take(event: Event, answer: Answer, reader: Any) -> None:
    """Add one event to the answer."""
    answer.streamed = True
    if event.data.strip() == b"[DONE]":
        answer.done_end = event.end
        return
    try:
        data = load_json(event.data)
    except ValueError as problem:
        if event.kind == "error":
            answer.error = answer.error or quote(event.data)
        else:
            answer.parse_error = f"event is not JSON ({problem}): {quote(event.data)}"
        return
    if not isinstance(data, Mapping):
        answer.parse_error = f"event is not an object: {quote(event.data)}"
        return
    said: Said = reader(data)
    if said.error is None and event.kind == "error":
        said.error = quote(event.data)
    if said.error is not None and answer.error is None:
        answer.error = said.error
    if said.prompt_tokens is not None:
        answer.prompt_tokens = said.prompt_tokens
    if said.finish_reason is not None:
        answer.finish_reason = said.finish_reason
    if said.completion_tokens is not None:
        answer.completion_tokens = said.completion_tokens
    tokens = _settle_counts(answer, said)
    if said.keeps is not None:
        answer.text = ["".join(answer.text)[: said.keeps]]
    if tokens is not None:
        answer.event_end.append(event.end)
        answer.event_tokens.append(tokens)
        answer.text.append(said.text)
        answer.token_ids.extend(said.token_ids)


def _settle_counts(answer: Answer, said: Said) -> int | None:
    """Tokens of this event, 0 when they are not known, None when it is no token event.

    A count that grew since the last one belongs to this event alone only if no event in between went uncounted; else
    it is shared out where it comes to one a token event. A closing event that first tells the count of all that came
    before it is no token.
    """
    place = len(answer.event_end)
    if said.completion_tokens is None or not said.has_choices:
        if not said.carries:
            return None
        answer.counted += len(said.token_ids)
        if not said.token_ids:
            answer.uncounted.append(place)
        return len(said.token_ids)
    grown = max(0, said.completion_tokens - answer.counted)
    answer.counted += grown
    before, answer.uncounted = answer.uncounted, []
    if not before:
        return (grown or len(said.token_ids)) if said.carries or grown else None
    is_token = said.carries or (grown > len(before) and said.finish_reason is None)
    one_each = grown == len(before) + is_token
    if one_each:
        for earlier in before:
            answer.event_tokens[earlier] = 1
    if not is_token:
        return None
    return 1 if one_each else len(said.token_ids)


@dataclass(frozen=True, slots=True)
class Expect:
    """What a request has to fulfil beyond a clean stream."""

    ignore_eos: bool = True
    check_prompt: bool = True
    prompt_offset: int = 0
    """Tokens that a chat template adds to every prompt."""


def to_record(exchange: Exchange, body: bytes, api: Api, expect: Expect = Expect()) -> RequestRecord:
    """The record of one exchange: token events with their stamps, counts and the status."""
    answer = read_answer(body, api) if exchange.status == 200 else Answer()
    ends = exchange.marks[0::3]
    events: list[tuple[int, int, int]] = []
    for end in answer.event_end:
        read = min(bisect_left(ends, end), len(ends) - 1)
        kernel, user = exchange.marks[3 * read + 1], exchange.marks[3 * read + 2]
        events.append((kernel, user - kernel, read))
    count, source = _count_tokens(answer)
    tokens = tuple(answer.event_tokens)
    if 0 in tokens and count == len(tokens) and source == "usage":
        tokens = (1,) * len(tokens)
    status, error = _judge(exchange, body, answer, expect, count, source)
    return RequestRecord(
        stream=exchange.stream,
        index=exchange.index,
        warmup=exchange.warmup,
        status=status,
        planned_input_tokens=exchange.input_tokens,
        planned_output_tokens=exchange.output_tokens,
        sent_ns=exchange.sent_ns,
        scheduled_ns=exchange.due_ns,
        end_ns=_end_ns(exchange, answer),
        event_ns=tuple(e[0] for e in events),
        event_lag_ns=tuple(e[1] for e in events),
        event_tokens=tokens,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        finish_reason=answer.finish_reason,
        http_status=exchange.status,
        error=error,
        request_id=exchange.request_id,
        text="".join(answer.text),
        token_ids=tuple(answer.token_ids),
        not_streamed=_in_one_piece(events, count),
        output_tokens=count,
        token_count_source=source,
    )


def _count_tokens(answer: Answer) -> tuple[int | None, str]:
    """Best output count and where it comes from; a count nobody saw a token of is not credited."""
    if not answer.event_end:
        return 0, "events"
    if answer.completion_tokens is not None:
        return answer.completion_tokens, "usage"
    if answer.token_ids:
        return len(answer.token_ids), "token_ids"
    return len(answer.event_end), "chunks"


def _in_one_piece(events: list[tuple[int, int, int]], count: int | None) -> bool:
    """True when all of at least two tokens arrived together, so that no time between them was observed.

    Together means: in one read, with one stamp, or - 16 tokens and more, over several segments - faster than
    20 us a token, which no model decodes.
    """
    if not events or (count or len(events)) < 2:
        return False
    span = events[-1][0] - events[0][0]
    steps = (count or len(events)) - 1
    return span == 0 or events[0][2] == events[-1][2] or (steps >= 15 and span < 20_000 * steps)


def _end_ns(exchange: Exchange, answer: Answer) -> int | None:
    if answer.done_end is not None:
        ends = exchange.marks[0::3]
        return exchange.marks[3 * min(bisect_left(ends, answer.done_end), len(ends) - 1) + 1]
    return exchange.end_ns or None


def _judge(
    exchange: Exchange, body: bytes, answer: Answer, expect: Expect, count: int | None, source: str
) -> tuple[Status, str]:
    """Status of the request and one line that explains it; the first fault in causal order decides."""
    transport = _transport_fault(exchange, body, answer)
    if answer.error is not None:
        return Status.ERROR_IN_STREAM, answer.error
    if answer.parse_error is not None:
        return Status.PARSE_ERROR, answer.parse_error
    if transport is not None:
        return transport
    if answer.finish_reason in ABORTS:
        return Status.ABORTED, f"finish_reason {answer.finish_reason}"
    if not answer.event_end:
        if body.strip() and not answer.streamed and answer.finish_reason is None:
            kind = exchange.header("content-type") or "no content type"
            return Status.PARSE_ERROR, f"200 without an event stream ({kind}): {quote(body)}"
        return Status.EMPTY, "200 without one token"
    if answer.finish_reason is None and answer.done_end is None:
        return Status.TRUNCATED, f"ended after {count} tokens without finish_reason or [DONE]"
    return _judge_length(exchange, answer, expect, count, source)


def _transport_fault(exchange: Exchange, body: bytes, answer: Answer) -> tuple[Status, str] | None:
    seen = f" after {quote(body)}" if body and not answer.event_end else ""
    said = f"{exchange.error or exchange.end.value}{seen}"
    if exchange.reused and exchange.status is None and exchange.end in (End.EOF, End.RESET):
        said += ", on a connection that had carried a request before: the server does not keep connections"
    if exchange.end in (End.CONNECT, End.NOT_SENT):
        return Status.CONNECT_ERROR, said
    if exchange.status is not None and exchange.status != 200:
        return Status.HTTP_ERROR, _http_error(exchange, body)
    if answer.done_end is not None:
        return None
    match exchange.end:
        case End.TIMEOUT:
            return Status.TIMEOUT, said
        case End.BAD_HTTP | End.TOO_LARGE:
            return Status.PARSE_ERROR, said
        case End.RESET:
            return Status.RESET, said
        case End.EOF if exchange.status is None:
            return Status.RESET, said
    return None


def _http_error(exchange: Exchange, body: bytes) -> str:
    extra = [
        f"{label} {exchange.header(name)}"
        for name, label in (("location", "Location:"), ("retry-after", "Retry-After:"))
        if exchange.header(name)
    ]
    parts = [f"HTTP {exchange.status}", *extra]
    return ", ".join(parts) + (f": {quote(body)}" if body else " without a body")


def _judge_length(
    exchange: Exchange, answer: Answer, expect: Expect, count: int | None, source: str
) -> tuple[Status, str]:
    planned = exchange.output_tokens
    if expect.check_prompt and answer.prompt_tokens is not None:
        want = exchange.input_tokens + expect.prompt_offset
        if answer.prompt_tokens != want:
            return (
                Status.WRONG_PROMPT_LENGTH,
                f"server counted {answer.prompt_tokens} prompt tokens, planned {want}",
            )
    if not expect.ignore_eos:
        return Status.OK, ""
    if count != planned:
        basis = {"usage": "", "token_ids": " (token ids)"}.get(source, " (events: the server sent no usage)")
        return Status.SHORT, f"{count} output tokens{basis}, planned {planned}"
    if answer.finish_reason not in (None, "length"):
        return (
            Status.SHORT,
            f"finish_reason {answer.finish_reason!r} although end-of-sequence was to be ignored",
        )
    return Status.OK, ""
