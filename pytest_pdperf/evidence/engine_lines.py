"""Engines' progress lines in all their versions, read by field name because their order and set keep changing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_VLLM = re.compile(
    r"(?:(?:Engine (?P<engine>\d+)|(?P<many>\d+) Engines Aggregated): )?(?P<rest>Avg prompt throughput: .*)"
)
_SGLANG = re.compile(r"\b(?P<kind>Prefill|Decode) batch(?: \[(?P<iter>\d+)\])?[.,]\s*(?P<rest>.*)")

_VLLM_FIELDS: Mapping[str, str] = {
    "Avg prompt throughput": "prompt_tps",
    "Avg generation throughput": "gen_tps",
    "Running": "running",
    "Waiting": "waiting",
    "Pending": "waiting",
    "Deferred": "deferred",
    "Preemptions": "preemptions",
    "GPU KV cache usage": "kv_pct",
    "KV cache usage": "kv_pct",
    "Prefix cache hit rate": "prefix_hit_pct",
    "External prefix cache hit rate": "external_hit_pct",
    "MM cache hit rate": "mm_hit_pct",
}
_SGLANG_FIELDS: Mapping[str, str] = {
    "#new-seq": "new_seq",
    "#new-token": "new_token",
    "#cached-token": "cached",
    "#running-req": "running",
    "#queue-req": "queued",
    "#unbootstrapped-req": "waiting_bootstrap",
    "#bootstrap-req": "waiting_bootstrap",
    "#transferring-req": "inflight",
    "#inflight-req": "inflight",
    "#pending-token": "pending_token",
    "#token": "tokens",
    "#full token": "tokens",
    "token usage": "usage",
    "full token usage": "usage",
    "#transfer-req": "transfer",
    "#retracted-req": "retracted",
    "accept len": "accept_len",
    "accept rate": "accept_rate",
    "input throughput (token/s)": "input_tps",
    "gen throughput (token/s)": "gen_tps",
}
_PREALLOC = {"prefill": "waiting_bootstrap", "decode": "prealloc"}
"""`#prealloc-req` is the bootstrap queue on a prefill engine and the preallocation queue on a decode engine."""


@dataclass(frozen=True, slots=True)
class EngineLine:
    """One progress line. A field that the line does not have is absent from `values`, never zero.

    Throughputs are tokens/s, `*_pct` percent, `usage` 0..1. vLLM's `prompt_tps` on a decode engine may count
    transferred tokens and is no proof of recomputation; `deferred` counts requests that wait for remote KV.
    """

    kind: Literal["engine", "prefill", "decode"]
    engine: str = ""
    """vLLM: `000`, or `aggregated` for a sum over engines; empty before V1, which had one."""
    iteration: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, str] = field(default_factory=dict)
    """Fields that are not known, as printed."""

    def get(self, name: str) -> float | None:
        """Value of a field, or None when this line does not have it."""
        return self.values.get(name)


def parse_engine_line(line: str) -> EngineLine | None:
    """vLLM's throughput line or SGLang's batch line; None for any other line."""
    text = _ANSI.sub("", line).strip()
    if found := _VLLM.search(text):
        values, extra = _split(found["rest"], _VLLM_FIELDS)
        engine = found["engine"] or ("aggregated" if found["many"] else "")
        return EngineLine("engine", engine, None, values, extra)
    if found := _SGLANG.search(text):
        kind: Literal["prefill", "decode"] = "prefill" if found["kind"] == "Prefill" else "decode"
        values, extra = _split(found["rest"], {**_SGLANG_FIELDS, "#prealloc-req": _PREALLOC[kind]})
        return EngineLine(kind, "", int(found["iter"]) if found["iter"] else None, values, extra)
    return None


def _split(rest: str, names: Mapping[str, str]) -> tuple[dict[str, float], dict[str, str]]:
    values: dict[str, float] = {}
    extra: dict[str, str] = {}
    for piece in rest.split(", "):
        name, sign, value = piece.strip().rstrip(",").rpartition(": ")
        if not sign:
            continue
        key, number = names.get(name), _NUMBER.match(value)
        if key is None or number is None:
            extra[name] = value
        else:
            values[key] = float(number.group().replace(",", ""))
    return values, extra


def transfer_stuck(lines: Iterable[str], *, in_a_row: int = 3) -> bool:
    """True when an SGLang decode engine waits for KV in `in_a_row` lines and generates nothing meanwhile."""
    run = 0
    for line in lines:
        parsed = parse_engine_line(line)
        if parsed is None or parsed.kind != "decode":
            continue
        run = run + 1 if (parsed.get("transfer") or 0) > 0 and parsed.get("gen_tps") == 0 else 0
        if run >= in_a_row:
            return True
    return False


def steady_gen_tps(lines: Iterable[str]) -> list[float]:
    """Generation throughputs of SGLang decode lines without the first after each idle gap.

    That one is divided by the gap. A line with no running request, or a prefill engine's, ends a busy stretch.
    """
    found: list[float] = []
    busy = False
    for line in lines:
        parsed = parse_engine_line(line)
        if parsed is None or parsed.kind != "decode":
            continue
        rate, running = parsed.get("gen_tps"), parsed.get("running") or 0
        if running > 0 and busy and rate is not None:
            found.append(rate)
        busy = running > 0
    return found
