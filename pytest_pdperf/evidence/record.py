"""The proof of a cell as data: frozen, complete with its holes, and the same after a trip through JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from pytest_pdperf.spec.topology import Role


class Status(StrEnum):
    """What the engines' own counters say about the path that the requests took."""

    PROVEN = "proven"
    """Every prompt token on decode came over the KV transfer."""
    PARTIAL = "partial"
    """Some did."""
    BYPASSED = "bypassed"
    """None did, and prefill is not known to have worked either."""
    RECOMPUTED = "recomputed"
    """None did although prefill worked: decode prefilled the same prompts again."""
    UNKNOWN = "unknown"
    NOT_APPLICABLE = "not_applicable"
    """Aggregated serving: there is no path to prove."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the client sent in the window between the two scrapes, warm-ups included."""

    requests: int
    prompt_tokens: int | None = None
    """Sum over those requests; None when not all lengths are known."""
    completion_tokens: int | None = None
    tail_tokens: float = 0.0
    """Tokens at the end of a prompt that decode may compute itself, mean over the requests: what connectors of whole
    blocks leave (see `whole_block_tail`), else 0."""


@dataclass(frozen=True, slots=True)
class InstanceEvidence:
    """One engine process over the window. None is a hole, never a zero; `Evidence.reasons` says why."""

    id: str
    role: Role
    requests: float | None = None
    requests_failed: float | None = None
    requests_aborted: float | None = None
    prompt_tokens: float | None = None
    computed_tokens: float | None = None
    """Prompt tokens that it prefilled itself."""
    cached_tokens: float | None = None
    """Prompt tokens from its own prefix cache."""
    transferred_tokens: float | None = None
    """Prompt tokens whose KV came from another engine."""
    generation_tokens: float | None = None
    preemptions: float | None = None
    cache_hit_rate: float | None = None
    """Hits / queries of its own prefix cache, in tokens; transferred tokens are not hits."""
    kv_usage_before: float | None = None
    kv_usage_after: float | None = None
    idle: bool | None = None
    """running = waiting = 0 and KV usage back to within one block on the page after the window."""
    restarted: bool | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Server-side proof for one cell: `problems` make it INVALID, `notes` do not, `reasons` explain holes."""

    kind: str
    status: Status
    summary: str
    """One line for people: `partial: 7 of 10 by tokens (recompute share 0.3)`."""
    proven_requests: int | None
    expected_requests: int
    instances: tuple[InstanceEvidence, ...] = ()
    prefill_imbalance: float | None = None
    decode_imbalance: float | None = None
    """Largest replica / mean over the replicas of the role (for aggregated: of the servers), by requests."""
    recomputed_tokens: float | None = None
    """Prompt tokens that decode prefilled itself."""
    transferred_tokens: float | None = None
    transfers: float | None = None
    """As the engine counts: vLLM one for each rank and request, SGLang one for each request."""
    transfers_per_request: float | None = None
    transfer_bytes: float | None = None
    bytes_per_request: float | None = None
    """transfer_bytes over the requests, so over all ranks of a request."""
    transfer_seconds: float | None = None
    """Sum over single transfers, which overlap."""
    transfer_rate: float | None = None
    """bytes / transfer_seconds: mean rate of one transfer of one rank, bytes/s; no aggregate bandwidth."""
    claimed_rate: float | None = None
    """Mean of the rates that the engine itself reports, bytes/s."""
    wall_rate: float | None = None
    """bytes / length of the window, bytes/s: what the link carried on average."""
    window_s: float | None = None
    failed_transfers: float | None = None
    failed_notifications: float | None = None
    failed_bootstraps: float | None = None
    expired_requests: float | None = None
    late_notifications: float | None = None
    retries: float | None = None
    """Requests that a role saw beyond those that were sent, or that the router says it tried again."""
    preemptions: float | None = None
    cache_hit_rate: float | None = None
    """Largest over the instances."""
    leak: bool | None = None
    restarts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def failed_any(self) -> float | None:
        """Failed transfers and notifications together, as newer logs print them; None while either is a hole."""
        if self.failed_transfers is None or self.failed_notifications is None:
            return None
        return self.failed_transfers + self.failed_notifications

    @property
    def valid(self) -> bool:
        """False when the numbers of this cell must not be judged. An unknown path is no valid one for PD."""
        return not self.problems and self.status in (Status.PROVEN, Status.NOT_APPLICABLE)

    def to_json(self) -> dict[str, Any]:
        """Plain data without NaN or infinity; `from_json` is the inverse."""
        data = asdict(self)
        _refuse_nonfinite(data, "evidence")
        return {key: _plain(value) for key, value in data.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evidence:
        """Inverse of `to_json`. Raises ValueError for unknown keys, a missing key or an unknown status."""
        known = {f.name for f in fields(cls)}
        if strange := set(data) - known:
            raise ValueError(f"evidence has unknown keys: {', '.join(sorted(strange))}")
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}
        try:
            values["status"] = Status(data["status"])
            values["instances"] = tuple(
                InstanceEvidence(**{**row, "role": Role(row["role"])}) for row in data.get("instances", ())
            )
            evidence = cls(**values)
        except (KeyError, TypeError) as problem:
            raise ValueError(f"evidence is incomplete or malformed: {problem}") from None
        _refuse_nonfinite(asdict(evidence), "evidence")
        return evidence


def _plain(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _refuse_nonfinite(value: Any, place: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place} is {value}: not a finite number")
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_nonfinite(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_nonfinite(item, f"{place}[{index}]")
