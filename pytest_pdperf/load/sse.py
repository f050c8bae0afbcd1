"""Server-sent events from bytes that may be cut anywhere, with the byte that completed each event.

An event is complete at its blank line, so its receive time is that of the read which brought the blank line's
first end-of-line byte. Follows https://html.spec.whatwg.org/multipage/server-sent-events.html, with two
deviations that inference servers need: an event whose data is blank is not dispatched, and what is left at
the end of the body is offered apart (`rest`), because some servers forget the last blank line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_END_OF_LINE = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"
_DONE = re.compile(rb"[\r\n]data: ?\[DONE\]\s*\Z")
_DONE_BYTES = 32
"""As much of a body's end as is looked at for it."""


class Event(NamedTuple):
    """One dispatched event."""

    end: int
    """Bytes of the body up to and including the end-of-line byte that completed the event."""
    kind: str
    """The `event:` field, `message` when there was none."""
    data: bytes


def says_done(pieces: Sequence[bytes]) -> bool:
    """Whether a body, as far as it has come in these pieces, ends with `[DONE]`: no event follows then, whatever the
    HTTP message still does. Asked after every piece, so it costs little where the last one is no such end.
    """
    if not pieces or pieces[-1].rstrip()[-1:] != b"]":
        return False
    return _DONE.search((b"\n" + b"".join(pieces[-_DONE_BYTES:]))[-_DONE_BYTES:]) is not None


class SseParser:
    """Incremental parser: `feed` bytes in any cut, get the events that became complete."""

    __slots__ = ("_data", "_kind", "_offset", "_skip_lf", "_started", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._offset = 0
        self._data: list[bytes] = []
        self._kind = ""
        self._skip_lf = False
        self._started = False

    def feed(self, chunk: bytes) -> list[Event]:
        """Events completed by `chunk`, in order."""
        buffer = self._tail + chunk if self._tail else chunk
        start = 0
        if not self._started:
            if len(buffer) < len(_BOM) and _BOM.startswith(buffer):
                self._tail = buffer
                return []
            self._started = True
            if buffer.startswith(_BOM):
                start = len(_BOM)
        if self._skip_lf and len(buffer) > start:
            self._skip_lf = False
            if buffer[start] == 0x0A:
                start += 1
        events = []
        for match in _END_OF_LINE.finditer(buffer, start):
            line_end, next_line = match.span()
            if line_end == start:
                event = self._dispatch(self._offset + line_end + 1)
                if event is not None:
                    events.append(event)
            else:
                self._field(buffer[start:line_end])
            start = next_line
        if start == len(buffer) and buffer.endswith(b"\r"):
            self._skip_lf = True
        self._offset += start
        self._tail = buffer[start:]
        return events

    def rest(self) -> Event | None:
        """The unfinished event at the end of the body, None when nothing with data is pending."""
        if self._tail:
            self._field(self._tail)
            self._offset += len(self._tail)
            self._tail = b""
        return self._dispatch(self._offset)

    def _dispatch(self, end: int) -> Event | None:
        data = b"\n".join(self._data)
        kind = self._kind or "message"
        self._data.clear()
        self._kind = ""
        return Event(end, kind, data) if data.strip() else None

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if value.startswith(b" "):
            value = value[1:]
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._kind = value.decode("utf-8", "replace")
