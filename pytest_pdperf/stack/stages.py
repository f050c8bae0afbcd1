"""How long one stage of a start-up may take, so that a stage that hangs is told before the whole deadline is over."""

from __future__ import annotations

from collections.abc import Mapping

REFERENCE_S = 900.0
"""The `--startup-timeout` (its default) for which the tables below are written; another one scales them."""

FLOOR_S = 60.0
"""No shipped limit gets smaller by scaling: imports and a first handshake take what they take."""

STARTING = "starting"
"""The stage of a process that has not said anything yet."""

_VLLM: Mapping[str, float] = {
    STARTING: 300.0,
    "reading configuration": 300.0,
    "starting engine core": 300.0,
    "loading weights": 780.0,
    "setting up KV transfer": 180.0,
    "profiling memory": 420.0,
    "torch.compile": 600.0,
    "capturing graphs": 480.0,
    "serving": 120.0,
}
_SGLANG: Mapping[str, float] = {
    STARTING: 300.0,
    "reading configuration": 300.0,
    "starting schedulers": 300.0,
    "loading weights": 780.0,
    "allocating KV cache": 300.0,
    "setting up KV transfer": 180.0,
    "capturing graphs": 600.0,
    "built-in warm-up": 420.0,
    "serving": 120.0,
}
_SIMULATED: Mapping[str, float] = {
    STARTING: 180.0,
    "loading weights": 300.0,
    "opening port": 120.0,
    "ready": 120.0,
}
TABLES: Mapping[str, Mapping[str, float]] = {
    "vllm": _VLLM,
    "sglang": _SGLANG,
    "sim": _SIMULATED,
    "sim-sglang": _SIMULATED,
}
"""Engine -> stage -> seconds under REFERENCE_S. Generous: several times what a 70B model from a network disk takes.
Simulated engines take a second or two, or as long as the fault `slow_start` says.

`loading weights` includes reading them over the network. `serving` (simulated: `ready`) is between the engine's own
word that it is ready and a health answer that lists the model.
"""


def stage_limits(engine: object, name: str, deadline_s: float) -> dict[str, float]:
    """Seconds that each known stage of an engine may take when the whole may take `deadline_s`.

    An engine may bring its own table as `stage_seconds` (stage -> seconds under REFERENCE_S); else it is looked up
    by `name`, and no limit is below FLOOR_S. A stage in no table, and every stage of an engine without a table, is
    bounded by the whole only.
    """
    own: Mapping[str, float] | None = getattr(engine, "stage_seconds", None)
    scale = deadline_s / REFERENCE_S
    if own is not None:
        return {stage: seconds * scale for stage, seconds in own.items()}
    return {stage: max(FLOOR_S, seconds * scale) for stage, seconds in TABLES.get(name, {}).items()}
