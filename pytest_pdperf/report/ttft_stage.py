"""A slower first token is one number with many causes: verdict rows of TTFT name the stage that moved."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from pytest_pdperf.evidence.ttft_split import STAGES, TtftSplit, moved_stage
from pytest_pdperf.gate.baseline import significant

from .outcomes import CellOutcome
from .usual_speed import speeds_of

KEY = "ttft_split"
"""Name under which a launch's stages lie in `gate.baseline.Launch.environment`."""

_MARK = "TTFT stages: "


def to_text(split: TtftSplit) -> str:
    """The means of a split in one line of JSON, four significant digits; unknown stages are left out."""
    known = {name: significant(ms) for name, ms in split.stages.items() if ms is not None}
    return json.dumps({"measured": significant(split.measured_ms), **known})


def from_text(text: str) -> TtftSplit | None:
    """Inverse of `to_text`; None for what is no such line."""
    try:
        data: Mapping[str, float] = json.loads(text)
        measured = float(data["measured"])
        stages = {name: float(data[name]) if name in data else None for name in STAGES}
    except (ValueError, KeyError, TypeError):
        return None
    return TtftSplit(measured, stages, measured - sum(ms for ms in stages.values() if ms is not None))


def circumstances(outcome: CellOutcome) -> dict[str, str]:
    """What a stored launch should remember of a cell beside its numbers: TTFT stages, speeds, transport, GPU clocks."""
    found = speeds_of(outcome.naming) if outcome.naming else {}
    if outcome.ttft_split is not None:
        found[KEY] = to_text(outcome.ttft_split)
    transport = outcome.details.get("transport")
    if transport:
        found["kv_transport"] = str(transport["used"])
    gpus = outcome.details.get("gpus") or []
    clocks = [gpu["sm_mhz"] for gpu in gpus if gpu["sm_mhz"] is not None]
    shares = [gpu["throttled_share"] for gpu in gpus if gpu["throttled_share"] is not None]
    if clocks:
        found["sm_mhz"] = f"{min(clocks):.0f}"
    if shares:
        found["throttled_share"] = f"{max(shares):.2f}"
    return found


def usual_split(environments: Iterable[Mapping[str, str]]) -> TtftSplit | None:
    """Mean stages over the launches of a baseline that stored theirs; None when none did.

    A stage that one of them does not know is not known.
    """
    found = [split for env in environments if (split := from_text(env.get(KEY, ""))) is not None]
    if not found:
        return None
    measured = fmean(split.measured_ms for split in found)
    stages: dict[str, float | None] = {}
    for name in STAGES:
        known = [ms for split in found if (ms := split.stages.get(name)) is not None]
        stages[name] = fmean(known) if len(known) == len(found) else None
    return TtftSplit(measured, stages, measured - sum(ms for ms in stages.values() if ms is not None))


@dataclass(frozen=True, slots=True)
class Stage:
    """The stage of TTFT to look at, and what is said of it."""

    name: str
    """Of `STAGES`; empty where none is known or none moved."""
    words: str


def stage_to_blame(now: TtftSplit | None, baseline: TtftSplit | None) -> Stage:
    """The stage that moved against the baseline, else the one that takes longest."""
    if now is None:
        return Stage("", f"{_MARK}not known")
    if baseline is None:
        stage = now.largest
        if stage is None:
            return Stage("", f"{_MARK}not known")
        ms = now.stages[stage] or 0.0
        share = f", {ms / now.measured_ms:.0%}" if now.measured_ms > 0 else ""
        longest = f"longest now is {_words(stage)} ({ms:.1f} of {now.measured_ms:.1f} ms mean{share})"
        return Stage(stage, f"{_MARK}the baseline stored none; {longest}")
    move = moved_stage(baseline, now)
    whole = f"mean {baseline.measured_ms:.1f} -> {now.measured_ms:.1f} ms"
    if move.stage == "none":
        return Stage("", f"{_MARK}{whole}, no stage moved")
    share = f", {move.share:.0%} of the change" if move.share is not None else ""
    words = f"{_MARK}{_words(move.stage)} moved by {move.change_ms:+.1f} ms{share} ({whole})"
    return Stage(move.stage if move.stage in STAGES else "", words)


def _words(stage: str) -> str:
    return stage.replace("_", " ")
