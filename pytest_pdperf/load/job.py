"""What the parent hands to the worker process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from .planned import StreamPlan
from .shares import Share
from .target import Target

PARENT = "PDPERF_WORKER_PARENT"
"""Environment variable that tells a worker whose death it must not survive."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of one cell."""

    target: Target
    streams: tuple[StreamPlan, ...]
    timeout_s: float
    """Deadline of one request."""
    run_id: str
    cpus: tuple[int, ...] = ()
    """Cores to stay on; empty leaves placement to the kernel."""
    processes: int = 1
    """Client processes that drive it together."""
    tickets: Mapping[str, int] = field(default_factory=dict)
    """Closed-loop stream -> inherited descriptor of the requests that are left (`shares.Tickets`)."""

    @property
    def total(self) -> int:
        """Measured requests of all streams."""
        return sum(len(s.requests) for s in self.streams)

    def write(self, path: Path) -> None:
        """Store as JSON. Holds no secret: header values are read from the environment by the worker."""
        path.write_bytes(
            orjson.dumps(
                {
                    "target": self.target.to_json(),
                    "streams": [s.to_json() for s in self.streams],
                    "timeout_s": self.timeout_s,
                    "run_id": self.run_id,
                    "cpus": self.cpus,
                    "processes": self.processes,
                    "tickets": dict(self.tickets),
                }
            )
        )

    @classmethod
    def read(cls, path: Path) -> Job:
        """Inverse of `write`."""
        data = orjson.loads(path.read_bytes())
        return cls(
            Target.from_json(data["target"]),
            tuple(StreamPlan.from_json(s) for s in data["streams"]),
            data["timeout_s"],
            data["run_id"],
            tuple(data["cpus"]),
            data["processes"],
            data["tickets"],
        )

    def share(self, number: int) -> Share:
        """The part of the process with this number, counted from 0."""
        return Share(number, self.processes, self.tickets)
