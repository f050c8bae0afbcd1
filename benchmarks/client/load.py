"""What every client under test is asked to do, and the form in which it reports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

MODEL = "paced"
"""Name under which the null server lists itself."""


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of equal streams against the null server."""

    streams: int
    """Clients, one request each at a time."""
    requests: int
    tokens: int
    ttft_ms: float
    itl_ms: float
    prompt_tokens: int = 128
    phases: int = 1
    """Streams spread evenly over a gap; 1 has all of them send at once, as the batch of an engine does."""
    hog_ms: float = 0.0
    """Block the event loop for so long in every period twice that; 0 for never."""

    @property
    def events_per_s(self) -> float:
        """Token events of all streams together while decoding."""
        return self.streams * 1000 / self.itl_ms

    def lasting(self, seconds: float) -> Load:
        """The same load with as many requests a client as fill about so many seconds, one at least."""
        each = (self.ttft_ms + (self.tokens - 1) * self.itl_ms) / 1e3
        return replace(self, requests=self.streams * max(1, round(seconds / each)))

    @property
    def pace(self) -> dict[str, object]:
        """What the null server wants to know."""
        return {"ttft_ms": self.ttft_ms, "itl_ms": self.itl_ms, "phases": self.phases}

    def body(self, index: int) -> dict[str, object]:
        """Request body of the index-th request."""
        return {
            "model": MODEL,
            "prompt": [1000 + (index * 7 + k) % 5000 for k in range(self.prompt_tokens)],
            "max_tokens": self.tokens,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, slots=True)
class Report:
    """A client's own account. `rows`: request id -> [sent ns, event ns ...], `lag_ns` where a client knows its lag."""

    rows: dict[str, list[int]]
    cpu_s: float
    lag_ns: list[int]
    bytes_per_event: float | None = None
    merged: int | None = None
    """Segments that the client knows to have lost their own stamp."""
    waited_s: float | None = None
    """Time in which the client could have run and another process had its core."""
    ttft_ms: dict[str, float] = field(default_factory=dict)
    """For programs that report durations only: request id -> TTFT; then `rows` is empty."""
    gaps_ms: dict[str, list[float]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Store as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Report:
        """Inverse of `write`."""
        return cls(**json.loads(path.read_text()))
