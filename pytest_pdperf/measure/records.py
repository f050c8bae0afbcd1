"""What the load generator hands over: one record a request, with a stamp for every token event."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """How a request ended. Only `ok` enters latency statistics."""

    OK = "ok"
    SHORT = "short"
    EMPTY = "empty"
    TRUNCATED = "truncated"
    RESET = "reset"
    ABORTED = "aborted"
    ERROR_IN_STREAM = "error_in_stream"
    PARSE_ERROR = "parse_error"
    HTTP_ERROR = "http_error"
    CONNECT_ERROR = "connect_error"
    TIMEOUT = "timeout"
    WRONG_PROMPT_LENGTH = "wrong_prompt_length"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as it was planned, sent and answered.

    All times are integer nanoseconds of one clock within a run (CLOCK_REALTIME, as kernel receive stamps
    are). `event_ns[i]` is the receive time of token event i, `event_lag_ns[i]` how much later user space saw
    it, and `event_tokens[i]` the tokens it carried (0 = unknown).
    """

    stream: str
    index: int
    warmup: bool
    status: Status
    planned_input_tokens: int
    planned_output_tokens: int
    sent_ns: int
    """Last moment before the request's bytes were handed to the kernel."""
    scheduled_ns: int | None = None
    """When an open-loop schedule wanted it sent; None in a closed loop."""
    end_ns: int | None = None
    """[DONE], or end of the body."""
    event_ns: tuple[int, ...] = ()
    event_lag_ns: tuple[int, ...] = ()
    event_tokens: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    """As the server counted them; None when it did not say."""
    completion_tokens: int | None = None
    finish_reason: str | None = None
    http_status: int | None = None
    error: str = ""
    """One line, with the first bytes of what came instead of an answer."""
    request_id: str = ""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    not_streamed: bool = False
    """All tokens came in one read: TTFT, TPOT and ITL are unknown, e2e and counts are good."""
    output_tokens: int | None = None
    """Best count there is: usage, else token ids, else the number of token events (an approximation)."""
    token_count_source: str = "unknown"
    """`usage`, `token_ids`, `chunks`, or `events` where no token was seen and none is credited."""


@dataclass(frozen=True, slots=True)
class CellRecords:
    """Everything one run of one cell produced, plus what is known about the clock that measured it."""

    requests: tuple[RequestRecord, ...]
    stamp_source: str
    """`kernel` (SO_TIMESTAMPNS) or `user` (TLS, or no kernel support)."""
    started_ns: int
    ended_ns: int
    max_in_flight: int = 0
    """Largest number of measured requests open at once, over all streams."""
    reached_concurrency: dict[str, int] = field(default_factory=dict)
    """Per stream, the largest number of its requests open at once."""
    client_cpu_s: float = 0.0
    merged_segments: int = 0
    """Segments that a late client found merged by the kernel: their events' own receive times are lost."""
    warnings: tuple[str, ...] = ()
    client_processes: int = 1
    client_cores: str = ""
    """CPUs that the client was kept to, as `0-3,8`; empty when it was left to the kernel."""
    clock_step_ms: float = 0.0
    """How far the system clock, which every stamp is of, was set during the run: more than it can drift."""
