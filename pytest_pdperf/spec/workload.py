"""What to send: shapes, concurrency, arrivals and service objectives, cut into cells."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from .topology import Frozen


class ClosedLoop(Frozen):
    """`concurrency` clients, each sending its next request when the last one has ended (plus `think_s`)."""

    kind: Literal["closed"] = "closed"
    concurrency: int = Field(ge=1)
    think_s: float = Field(default=0.0, ge=0)


class OpenLoop(Frozen):
    """Requests sent on a schedule, whether or not earlier ones have ended."""

    kind: Literal["open"] = "open"
    rate_rps: float = Field(gt=0)
    process: Literal["constant", "poisson", "gamma"] = "poisson"
    burstiness: float = Field(default=1.0, gt=0)
    """Shape of the gamma process: 1 is Poisson, below 1 is burstier."""
    ramp_to_rps: float | None = Field(default=None, gt=0)


class TraceReplay(Frozen):
    """Arrivals and lengths from a file in Mooncake's trace format (JSON lines)."""

    kind: Literal["trace"] = "trace"
    path: str
    sha256: str = ""
    """Digest of the requests used: what the trace sends, wherever its file lies."""
    speed: float = Field(default=1.0, gt=0)


Arrival = Annotated[ClosedLoop | OpenLoop | TraceReplay, Field(discriminator="kind")]


class Slo(Frozen):
    """A request counts as good only when it keeps every bound given (milliseconds)."""

    ttft_ms: float | None = Field(default=None, gt=0)
    tpot_ms: float | None = Field(default=None, gt=0)
    e2e_ms: float | None = Field(default=None, gt=0)


class Stream(Frozen):
    """One traffic class of a cell."""

    name: str = "main"
    input_tokens: tuple[int, int]
    """Shortest and longest prompt, both inclusive; equal for a fixed length."""
    output_tokens: int = Field(ge=1)
    requests: int = Field(ge=1)
    arrival: Arrival

    @model_validator(mode="after")
    def _ordered(self) -> Stream:
        low, high = self.input_tokens
        if not 1 <= low <= high:
            raise ValueError(f"input_tokens must be 1 <= low <= high, got {low}..{high}")
        if isinstance(self.arrival, ClosedLoop) and self.requests < self.arrival.concurrency:
            raise ValueError(
                f"{self.requests} requests can never keep {self.arrival.concurrency} clients busy"
            )
        return self


class Cell(Frozen):
    """One measured unit: on one topology it is one pytest item."""

    workload: str
    id: str
    """Stable and readable, e.g. `in512-out256-c16`; part of the pytest id and of the baseline key."""
    streams: tuple[Stream, ...] = Field(min_length=1)
    warmups: int = Field(default=4, ge=0)
    slo: Slo = Slo()
    timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one request."""

    @model_validator(mode="after")
    def _named_well(self) -> Cell:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.id):
            raise ValueError(f"id {self.id!r} may hold only letters, digits, `.`, `_` and `-`")
        names = [stream.name for stream in self.streams]
        if len(set(names)) != len(names):
            raise ValueError(f"stream names must differ, got {', '.join(names)}")
        return self

    @property
    def main(self) -> Stream:
        """The stream whose metrics stand for the cell."""
        return self.streams[0]

    @property
    def concurrency(self) -> int | None:
        """Clients of the main stream in a closed loop, None otherwise."""
        return self.main.arrival.concurrency if isinstance(self.main.arrival, ClosedLoop) else None

    @property
    def load(self) -> dict[str, object]:
        """What the cell sends and asks for, as plain data for a digest: no path, name or deadline."""
        plain = self.model_dump(mode="json", include={"streams", "warmups", "slo"})
        for stream in plain["streams"]:
            stream["arrival"].pop("path", None)
        return plain

    @property
    def max_context(self) -> int:
        """Longest prompt plus output, in tokens: must fit the engine's `max_model_len`."""
        return max(s.input_tokens[1] + s.output_tokens for s in self.streams)


class Workload(Frozen):
    """A named set of cells."""

    name: str
    description: str = ""
    cells: tuple[Cell, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _cells_differ(self) -> Workload:
        ids = [cell.id for cell in self.cells]
        if len(set(ids)) != len(ids):
            raise ValueError(f"cell ids must differ, got {', '.join(ids)}")
        return self
