"""What is known of a cell once its records are summarised: the unit that is gated, reported and stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from .table import DEFINITIONS

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class MetricValue:
    """One number with the samples behind it. `value` None is "not measured", and `note` says why."""

    value: float | None
    n: int
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data; a number that is not finite becomes null and the note says so."""
        if self.value is not None and not math.isfinite(self.value):
            note = f"{self.note}; " if self.note else ""
            return {"value": None, "n": self.n, "note": f"{note}not finite: {self.value}"}
        return {"value": self.value, "n": self.n, "note": self.note}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        return cls(data["value"], data["n"], data.get("note", ""))


@dataclass(frozen=True, slots=True)
class CellResult:
    """One measured cell on one topology, from one run."""

    topology: str
    workload: str
    cell: str
    metrics: dict[str, MetricValue]
    """Metric id -> value. The main stream has the bare ids, every other stream `<stream>.<id>`."""
    requests: int
    """Measured requests, warm-ups left out."""
    ok: int
    streams: dict[str, dict[str, MetricValue]] = field(default_factory=dict)
    """Stream name -> its metrics, for cells with several streams."""
    status_counts: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    """Distinct error lines with how often each came, commonest first."""
    prompt_tokens: int = 0
    prompt_tokens_each: dict[str, float] = field(default_factory=dict)
    """Prompt tokens a request as the server counted them: keys min, mean, max; empty where it counted none."""
    completion_tokens: int = 0
    stamp_source: str = "unknown"
    client_lag_ms: dict[str, float | None] = field(default_factory=dict)
    """Keys p50, p99, max."""
    steady_window_s: float | None = None
    wall_s: float | None = None
    reached_concurrency: dict[str, int] = field(default_factory=dict)
    max_in_flight: int = 0
    client_cpu_s: float = 0.0
    client_processes: int = 1
    client_cores: str = ""
    """CPUs that the client was kept to, as `0-3,8`; empty when it was left to the kernel."""
    invalid: tuple[str, ...] = ()
    """Reasons why no performance may be read from this cell; empty means valid."""
    inconclusive: tuple[str, ...] = ()
    """Why its times prove nothing although its requests are good: the client shared its cores with the engines."""
    warnings: tuple[str, ...] = ()
    definitions: str = DEFINITIONS
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """Plain data without NaN or Infinity, ready for any strict JSON writer."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["metrics"] = {name: value.to_json() for name, value in self.metrics.items()}
        data["streams"] = {
            stream: {name: value.to_json() for name, value in metrics.items()}
            for stream, metrics in self.streams.items()
        }
        data["client_lag_ms"] = {k: _finite(v) for k, v in self.client_lag_ms.items()}
        for name in ("steady_window_s", "wall_s", "client_cpu_s"):
            data[name] = _finite(data[name])
        for name in ("invalid", "inconclusive", "warnings"):
            data[name] = list(data[name])
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`. Raises ValueError for another schema and for missing or unknown keys."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"cell result has schema {data.get('schema')!r}, this version reads {SCHEMA}")
        unknown = sorted(set(data) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(f"cell result has unknown key {unknown[0]!r}")
        try:
            values = dict(data)
            values["metrics"] = _metrics(data["metrics"])
            values["streams"] = {name: _metrics(metrics) for name, metrics in data["streams"].items()}
            values["invalid"] = tuple(data["invalid"])
            values["inconclusive"] = tuple(data.get("inconclusive", ()))
            values["warnings"] = tuple(data["warnings"])
            values["client_cpu_s"] = data["client_cpu_s"] or 0.0
            return cls(**values)
        except (KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"cell result is not whole: {problem!r}") from problem


def _metrics(data: Mapping[str, Any]) -> dict[str, MetricValue]:
    return {name: MetricValue.from_json(value) for name, value in data.items()}


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
