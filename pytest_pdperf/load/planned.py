"""Requests that are decided but not sent: what crosses from the planning process to the worker.

Apart from the planning itself, so that the worker imports neither numpy nor the workload models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Planned:
    """One request before it is sent."""

    prompt: tuple[int, ...]
    output_tokens: int
    at_s: float | None = None
    """Due time after the start of the clock; None in a closed loop."""

    def to_json(self) -> list[Any]:
        """Compact row of the job file."""
        return [self.prompt, self.output_tokens, self.at_s]

    @classmethod
    def from_json(cls, row: list[Any]) -> Planned:
        """Inverse of `to_json`."""
        return cls(tuple(row[0]), row[1], row[2])


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """One traffic class, ready to be driven: `concurrency` None means open loop by `at_s`."""

    name: str
    requests: tuple[Planned, ...]
    warmups: tuple[Planned, ...]
    concurrency: int | None
    think_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data for the job file."""
        return {
            "name": self.name,
            "requests": [r.to_json() for r in self.requests],
            "warmups": [r.to_json() for r in self.warmups],
            "concurrency": self.concurrency,
            "think_s": self.think_s,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StreamPlan:
        """Inverse of `to_json`."""
        return cls(
            data["name"],
            tuple(Planned.from_json(r) for r in data["requests"]),
            tuple(Planned.from_json(r) for r in data["warmups"]),
            data["concurrency"],
            data["think_s"],
        )
