"""What the engines and GPUs said of a cell, as rows of a table: where the KV went, who waited, what the GPUs did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .outcomes import CellOutcome
from .svg import short

GB = 1e9
MIB = 2.0**20


@dataclass(frozen=True, slots=True)
class Look:
    """One row: how to read it from the details of a cell, and what it means."""

    label: str
    definition: str
    read: Callable[[Mapping[str, Any]], str]


def at(data: object, *path: str) -> Any:
    """A value deep in plain data, None where the path ends early: files of other versions hold other keys."""
    for key in path:
        if not isinstance(data, Mapping):
            return None
        data = data.get(key)
    return data


def _number(data: Mapping[str, Any], *path: str, scale: float = 1.0, unit: str = "") -> str:
    value = at(data, *path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return f"{short(value / scale)} {unit}".rstrip()


def _rates(data: Mapping[str, Any]) -> str:
    single = _number(data, "evidence", "transfer_rate", scale=GB, unit="GB/s a transfer of one rank")
    link = _number(data, "evidence", "wall_rate", scale=GB, unit="GB/s over the window")
    return ", ".join(text for text in (single, link) if text)


def _volume(data: Mapping[str, Any]) -> str:
    count, size = at(data, "evidence", "transfers"), at(data, "evidence", "transfer_bytes")
    parts = []
    if isinstance(count, int | float):
        parts.append(f"{count:,.0f} transfers")
    if isinstance(size, int | float):
        parts.append(f"{size / GB:.3g} GB")
    parts.append(
        _number(data, "evidence", "bytes_per_request", scale=MIB, unit="MiB a request over all ranks")
    )
    return ", ".join(part for part in parts if part)


def _failures(data: Mapping[str, Any]) -> str:
    names = ("failed_transfers", "failed_notifications", "failed_bootstraps", "expired_requests", "retries")
    known = {name: at(data, "evidence", name) for name in names}
    shown = [
        f"{value:g} {name.replace('_', ' ')}"
        for name, value in known.items()
        if isinstance(value, int | float)
    ]
    return ", ".join(shown)


def _instances(what: str) -> Callable[[Mapping[str, Any]], str]:
    def read(data: Mapping[str, Any]) -> str:
        rows = at(data, "evidence", "instances")
        found = []
        for row in rows if isinstance(rows, list) else []:
            value = at(row, what)
            shown = f"{value:,.0f}" if isinstance(value, int | float) else "unknown"
            found.append(f"{at(row, 'id')} {shown}")
        return ", ".join(found)

    return read


def _transport(data: Mapping[str, Any]) -> str:
    used, proof = at(data, "transport", "used"), at(data, "transport", "proof")
    if not used:
        return ""
    asked = ", not what was asked for" if at(data, "transport", "as_asked") is False else ""
    return f"{used} (by {proof}){asked}" if proof and proof != "none" else f"{used}{asked}"


def _loads(data: Mapping[str, Any]) -> str:
    roles = at(data, "roles")
    found = []
    for name, row in roles.items() if isinstance(roles, Mapping) else []:
        served, waiting = (at(row, key) for key in ("served", "waiting"))
        parts = [
            f"{v:.2g} {w}"
            for v, w in ((served, "served"), (waiting, "waiting"))
            if isinstance(v, int | float)
        ]
        found.append(f"{name}: {', '.join(parts) or 'unknown'}")
    return "; ".join(found)


def _gpus(data: Mapping[str, Any]) -> str:
    rows = at(data, "gpus")
    found = []
    for position, row in enumerate(rows if isinstance(rows, list) else []):
        parts = [
            _number(row, "sm_mhz", unit="MHz"),
            _number(row, "power_w", unit="W"),
            _number(row, "temperature_c", unit="°C"),
        ]
        share = at(row, "throttled_share")
        if isinstance(share, int | float) and share > 0:
            parts.append(f"throttled {share:.0%} of the time")
        found.append(f"{position}: {', '.join(part for part in parts if part) or 'unknown'}")
    return "; ".join(found)


def _mixed(data: Mapping[str, Any]) -> str:
    beside, clear = at(data, "mixed", "stalled_share_beside"), at(data, "mixed", "stalled_share_clear")
    if not isinstance(beside, int | float):
        return ""
    rest = f", {clear:.1%} without" if isinstance(clear, int | float) else ""
    worst = _number(data, "mixed", "beside", "max_ms", unit="ms")
    return f"stalled {beside:.1%} of the time beside a long prefill{rest}" + (
        f"; longest gap {worst}" if worst else ""
    )


def _logged_rates(data: Mapping[str, Any]) -> str:
    rates = at(data, "logged", "generation_tps")
    if not isinstance(rates, Mapping):
        return ""
    return ", ".join(f"{id} {rate:,.0f} tok/s" for id, rate in rates.items())


LOOKS: tuple[Look, ...] = (
    Look(
        "evidence", "what the engines' own counters prove", lambda d: str(at(d, "evidence", "summary") or "")
    ),
    Look(
        "requests",
        "requests that each engine counted over the cell, warm-ups included",
        _instances("requests"),
    ),
    Look(
        "prompt tokens computed",
        "prompt tokens that each engine prefilled itself",
        _instances("computed_tokens"),
    ),
    Look(
        "prompt tokens transferred",
        "prompt tokens whose KV came from another engine",
        _instances("transferred_tokens"),
    ),
    Look("KV moved", "transfers as the engine counts them, and their bytes", _volume),
    Look("KV rate", "bytes / summed time of single transfers, and bytes / length of the window", _rates),
    Look("KV transport", "what really carried the KV, and what proves it", _transport),
    Look("failures", "counts of what went wrong between the roles", _failures),
    Look(
        "load",
        "mean requests in each replica of a role over the cell (summed time / wall time, Little's law)",
        _loads,
    ),
    Look(
        "waits longest for",
        "what requests wait for longest before their first token",
        lambda d: str(at(d, "limiting") or ""),
    ),
    Look(
        "generates, by its log",
        "median generation rate of each decode engine's own progress lines (SGLang)",
        _logged_rates,
    ),
    Look("steady beside burst", "streaming time of the main stream that was spent in stalls", _mixed),
    Look("GPUs", "median SM clock while busy, mean power, highest temperature", _gpus),
    Look(
        "energy",
        "energy of all GPUs over the cell / output tokens",
        lambda d: _number(d, "energy_per_output_token_j", unit="J a token"),
    ),
    Look(
        "router adds", "time that the router adds to a request", lambda d: _number(d, "router_ms", unit="ms")
    ),
)


def server_rows(outcomes: Sequence[CellOutcome | None]) -> list[tuple[str, str, tuple[str, ...]]]:
    """(label, definition, text for each outcome) of every row that at least one of them knows; None is no outcome."""
    rows = [row for row in [_faults(outcomes)] if any(row[2])]
    for look in LOOKS:
        texts = tuple(_safely(look, outcome) for outcome in outcomes)
        if any(texts):
            rows.append((look.label, look.definition, texts))
    return rows


def _faults(outcomes: Sequence[CellOutcome | None]) -> tuple[str, str, tuple[str, ...]]:
    texts = []
    for one in outcomes:
        naming = one.naming if one is not None else None
        named = [finding.line for finding in naming.findings] if naming else []
        holes = [f"unknown: {text}" for text in naming.unknown] if naming else []
        texts.append("; ".join(named + holes) or ("none seen" if naming else ""))
    what = (
        "faults that the engines' counters and speeds and the answers show, against the baseline's launches"
    )
    return "faults", what, tuple(texts)


def _safely(look: Look, outcome: CellOutcome | None) -> str:
    """The text of a row; data of another shape than expected is not known, never an error."""
    if outcome is None or not outcome.details:
        return ""
    try:
        return look.read(outcome.details)
    except (TypeError, ValueError, AttributeError, KeyError):
        return ""
