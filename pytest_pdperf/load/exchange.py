"""One request on the wire, as bytes and stamps: all that the timed path writes down.

Nothing here looks inside the body. `body` grows by what each read brought; `marks` holds, for each read, how
long the body was afterwards, the kernel's receive stamp and the moment user space had it - 24 bytes a read.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum


class End(StrEnum):
    """Why the exchange is over, as far as the transport can tell."""

    OPEN = "open"
    COMPLETE = "complete"
    """The HTTP message ended as its framing said."""
    DONE = "done"
    """`data: [DONE]` came and the server then held the message open."""
    EOF = "eof"
    """The peer closed before the message was complete, or the message ends at the close."""
    RESET = "reset"
    CONNECT = "connect"
    TIMEOUT = "timeout"
    BAD_HTTP = "bad_http"
    TOO_LARGE = "too_large"
    NOT_SENT = "not_sent"


@dataclass(slots=True)
class Exchange:
    """Raw outcome of one request. Times are ns of CLOCK_REALTIME; 0 means it did not happen."""

    stream: str
    index: int
    warmup: bool
    input_tokens: int
    output_tokens: int
    request_id: str = ""
    payload: bytes = b""
    due_ns: int | None = None
    sent_ns: int = 0
    head_ns: int = 0
    """Kernel stamp of the read that completed the response head."""
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: list[bytes] = field(default_factory=list)
    size: int = 0
    marks: array[int] = field(default_factory=lambda: array("q"))
    end: End = End.OPEN
    end_ns: int = 0
    error: str = ""
    reused: bool = False
    """Sent on a connection that had carried a request before."""
    user_stamps: bool = False
    """At least one read had no kernel stamp."""
    merged: int = 0
    """Segments whose own stamp was lost because the kernel merged them before they were read."""

    @property
    def key(self) -> str:
        """Name for messages: stream and position."""
        return f"{self.stream}[{'warm-up ' if self.warmup else ''}{self.index}]"

    def mark(self, kernel_ns: int, user_ns: int) -> None:
        """Note that the body has its present size since this read."""
        self.marks.extend((self.size, kernel_ns, user_ns))

    def header(self, name: str) -> str:
        """A response header by lower-case name, empty when absent."""
        return self.headers.get(name, "")
