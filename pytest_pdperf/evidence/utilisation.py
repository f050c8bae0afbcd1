"""Say which role a cell leans on: the one whose queue holds requests back is the one to give more GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pytest_pdperf.spec.topology import Role

from .exposition import Snapshot, Unknown
from .names import Quantity
from .readings import change
from .ttft_split import TtftSplit

LIMIT_SHARE = 0.1
"""A wait below this share of TTFT limits nothing."""


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """Mean number of requests in a role over the window, for each replica (Little's law: summed time / wall time).

    None when the engine does not time that stage.
    """

    role: Role
    replicas: int
    waiting: float | None
    served: float | None


def role_loads(
    before: Mapping[str, Snapshot | Unknown],
    after: Mapping[str, Snapshot | Unknown],
    roles: Mapping[str, Role],
    wall_s: float,
) -> tuple[RoleLoad, ...]:
    """Load of each role of the stack. `wall_s` is the length of the window in seconds and must be positive."""
    if wall_s <= 0:
        raise ValueError(f"the window must have a length, got {wall_s}")
    found = []
    for role in dict.fromkeys(roles.values()):
        names = [name for name, own in roles.items() if own is role]
        works = {Role.PREFILL: (Quantity.PREFILL_SECONDS,), Role.DECODE: (Quantity.DECODE_SECONDS,)}.get(
            role, (Quantity.PREFILL_SECONDS, Quantity.DECODE_SECONDS)
        )
        waiting = _seconds(before, after, names, (Quantity.QUEUE_SECONDS,))
        served = _seconds(before, after, names, works)
        scale = 1.0 / (wall_s * len(names))
        found.append(
            RoleLoad(
                role,
                len(names),
                None if waiting is None else waiting * scale,
                None if served is None else served * scale,
            )
        )
    return tuple(found)


def _seconds(
    before: Mapping[str, Snapshot | Unknown],
    after: Mapping[str, Snapshot | Unknown],
    names: list[str],
    quantities: tuple[Quantity, ...],
) -> float | None:
    total = 0.0
    for name in names:
        first, last = before.get(name), after.get(name)
        if not isinstance(first, Snapshot) or not isinstance(last, Snapshot):
            return None
        for quantity in quantities:
            part = change(first, last, quantity)
            if isinstance(part, Unknown):
                return None
            total += part
    return total


Limit = Literal["prefill", "transfer", "decode", "transfer or decode", "none", "unknown"]

_WAITS: tuple[tuple[Limit, str], ...] = (
    ("prefill", "prefill_queue"),
    ("transfer", "transfer"),
    ("decode", "decode_queue"),
)


def limiting_role(split: TtftSplit | Unknown) -> Limit:
    """What a request waits for longest before its first token, if that wait matters at all.

    vLLM counts the wait for remote KV in decode's queue: where its connector does not time the transfer (Mooncake), the
    two are one wait, `transfer or decode`. Else `unknown` when any of the waits is not known: it could be the longest.
    """
    if isinstance(split, Unknown):
        return "unknown"
    waits = [(name, split.stages.get(stage)) for name, stage in _WAITS]
    if split.stages.get("transfer") is None and split.stages.get("first_decode_step") is not None:
        both: Limit = "transfer or decode"
        waits = [waits[0], (both, split.stages.get("decode_queue"))]
    if any(value is None for _, value in waits):
        return "unknown"
    name, longest = max(((name, value or 0.0) for name, value in waits), key=lambda row: row[1])
    return name if longest >= LIMIT_SHARE * split.measured_ms else "none"
