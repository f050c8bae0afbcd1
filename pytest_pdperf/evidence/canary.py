"""A slow machine is not a slow engine: fixed work, timed before and after each launch, tells the two apart.

The engine has no part in it, so a canary that differs from the baseline's says that the surroundings differ. That makes
a verdict inconclusive; it is never subtracted from the numbers, because engine and canary do not slow down alike.
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from pytest_pdperf.engines.base import Programs
from pytest_pdperf.engines.installed import python_of
from pytest_pdperf.gpus.grammar import GpuRequest

from .gpu_trace import GpuSummary, judge_throttle

LIMIT = 0.03
"""A canary may differ from the baseline's by this much, either way."""

BEFORE, AFTER = "canary_before", "canary_after"
"""Names under which a launch's canaries lie in its environment."""

GPU_SCRIPT = Path(__file__).with_name("canary_gpu.py")
GPU_TIMEOUT_S = 120.0
"""Importing torch on a cold disk takes most of it; the work itself takes two seconds a GPU."""

CPU_LOOP = 10_000
CPU_COPY_BYTES = 16 * 2**20
CPU_REPEATS = 300

NO_CLOCK = "none: a simulated engine's clock is a model"

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Canary:
    """One look at the machine. Without numbers `note` says why there are none."""

    ms: Mapping[str, float] = field(default_factory=dict)
    """Name of the work -> milliseconds; of several GPUs or pairs the slowest."""
    spread: Mapping[str, float] = field(default_factory=dict)
    """Name of the work -> relative distance from the reported repeat to the next (CPU) or between quartiles (GPU)."""
    note: str = ""

    def to_text(self) -> str:
        """One line for a launch's environment, four significant digits."""
        if not self.ms:
            return self.note
        return json.dumps({"ms": _short(self.ms), "spread": _short(self.spread)}, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Canary:
        """Inverse of `to_text`; what holds no usable numbers is a canary without numbers, `text` its note."""
        try:
            data = json.loads(text)
            ms = {str(name): float(value) for name, value in data["ms"].items()}
            spread = {str(name): float(value) for name, value in data.get("spread", {}).items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls(note=text)
        if not all(math.isfinite(value) and value > 0 for value in ms.values()):
            return cls(note=text)
        return cls(ms, spread)


def _short(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}


# -- taking one --------------------------------------------------------------------------------------------


def cpu_canary(repeats: int = CPU_REPEATS, clock: Clock = time.perf_counter) -> Canary:
    """Time an integer loop and a memory copy in this process; takes under a second.

    Others on the machine can only add time, so the fastest repeat is the machine's own. `spread` is how far the
    second fastest lies above it: small when the fastest was no accident.
    """
    if repeats < 2:
        raise ValueError("one repeat cannot tell how repeatable it is")
    source, target = bytearray(CPU_COPY_BYTES), bytearray(CPU_COPY_BYTES)

    def copy() -> None:
        target[:] = source

    ms: dict[str, float] = {}
    spread: dict[str, float] = {}
    for name, work in (("integer_loop", _integer_loop), ("memory_copy", copy)):
        times = []
        for _ in range(repeats):
            began = clock()
            work()
            times.append(clock() - began)
        first, second = sorted(times)[:2]
        if first <= 0:
            return Canary(note="unknown: the clock did not advance")
        ms[name], spread[name] = first * 1000, second / first - 1
    return Canary(ms, spread)


def _integer_loop() -> int:
    state = 12345
    for _ in range(CPU_LOOP):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
    return state


Runner = Callable[[Sequence[str], Mapping[str, str], float], str]
"""(command line, environment, seconds it may take) -> what it printed; raises OSError or SubprocessError."""


def run_script(argv: Sequence[str], env: Mapping[str, str], timeout_s: float) -> str:
    """Run a command to its end and return its standard output. Past the time it is killed."""
    done = subprocess.run(
        list(argv), env=dict(env), timeout=timeout_s, check=True, capture_output=True, text=True
    )
    return done.stdout


def gpu_canary(
    python: Path | None,
    visible: Sequence[str],
    env: Mapping[str, str],
    run: Runner = run_script,
) -> Canary:
    """Time a GEMM, a copy within HBM and a copy from GPU to GPU with the engine's own torch, in a process of its own.

    `visible` are strings for CUDA_VISIBLE_DEVICES. The process ends before this returns, so its memory is free again.
    Never raises: a canary that cannot be taken is no reason to measure nothing.
    """
    if python is None:
        return Canary(note="unknown: no Python of the engine's environment is known")
    try:
        printed = run(
            (str(python), str(GPU_SCRIPT)), {**env, "CUDA_VISIBLE_DEVICES": ",".join(visible)}, GPU_TIMEOUT_S
        )
    except subprocess.CalledProcessError as problem:
        lines = str(problem.stderr or "").strip().splitlines()
        return Canary(note=f"unknown: {lines[-1] if lines else f'exit status {problem.returncode}'}")
    except (OSError, subprocess.SubprocessError) as problem:
        return Canary(note=f"unknown: {problem}")
    lines = printed.strip().splitlines()
    found = Canary.from_text(lines[-1] if lines else "")
    return found if found.ms else Canary(note="unknown: it printed no numbers")


class Canaries:
    """The canaries of a run's launches. `take` is None where there is nothing to time."""

    def __init__(
        self, take: Callable[[], Canary] | None, say: Callable[..., None], why_none: str = ""
    ) -> None:
        self._take = take
        self._say = say
        self._why_none = why_none
        self._found: dict[str, dict[str, str]] = {}

    def before(self, launch_id: str) -> None:
        """Take one before a launch comes up. After a role died the launch comes up again: the latest counts."""
        self._look(launch_id, BEFORE)

    def after(self, launch_id: str) -> None:
        """Take one when a launch is down and its memory free."""
        self._look(launch_id, AFTER)

    def of(self, launch_id: str) -> Mapping[str, str]:
        """What a launch's environment says of its canaries, as far as they were taken."""
        return dict(self._found.get(launch_id, {}))

    def stop(self) -> None:
        """Take no more: the run is being ended."""
        self._take = None
        self._why_none = ""

    def _look(self, launch_id: str, kind: str) -> None:
        if self._take is None:
            if self._why_none:
                self._found.setdefault(launch_id, {})[kind] = self._why_none
            return
        canary = self._take()
        self._found.setdefault(launch_id, {})[kind] = canary.to_text()
        shown = ", ".join(f"{name} {value:.4g} ms" for name, value in canary.ms.items()) or canary.note
        self._say(f"{launch_id}: {kind.replace('_', ' ')}: {shown}", detail=True)


def canaries_for(
    gpus: GpuRequest | None, *, off: str, take: Callable[[], Canary], say: Callable[..., None]
) -> Canaries:
    """The canaries that fit the devices of a run: `take` on GPUs, `cpu_canary` on a CPU, none for the simulator.

    `off` is the option that rules them out, empty for none.
    """
    if gpus is None:
        return Canaries(None, say, NO_CLOCK)
    if off:
        return Canaries(None, say, f"off: {off}")
    return Canaries(cpu_canary if gpus.cpu else take, say)


def engine_python(programs: Programs, engine: str) -> Path | None:
    """The interpreter that runs an engine's program and so has its torch; None when it cannot be told."""
    program = programs.find(engine)
    return (python_of(program) if program else None) or programs.find("python3")


# -- judging -----------------------------------------------------------------------------------------------


def differences(
    now: Mapping[str, str], stored: Iterable[Mapping[str, str]], limit: float = LIMIT
) -> tuple[str, ...]:
    """Why numbers made in `now` cannot be held against those made in `stored` (environments of launches).

    Compared are both canaries, each with the median of its own kind, and clocks and throttled share of the GPUs.
    What one side does not know is not compared. Empty means that nothing speaks against a comparison.
    """
    past = list(stored)
    if not past:
        return ()
    found = [*canary_differences(now, past, limit)]
    throttled = _throttled(now, past)
    return (*found, throttled) if throttled else tuple(found)


def canary_differences(
    now: Mapping[str, str], past: Sequence[Mapping[str, str]], limit: float = LIMIT
) -> list[str]:
    """The part of `differences` that canaries tell: one line for each work that is off."""
    lines = []
    for kind, when in ((BEFORE, "before"), (AFTER, "after")):
        mine = Canary.from_text(now.get(kind, ""))
        theirs = [Canary.from_text(env.get(kind, "")).ms for env in past]
        for name, value in sorted(mine.ms.items()):
            usual = [ms[name] for ms in theirs if name in ms]
            if not usual:
                continue
            base = median(usual)
            change = value / base - 1
            if abs(change) > limit:
                repeats = f", repeats to {mine.spread[name]:.1%}" if name in mine.spread else ""
                lines.append(
                    f"canary {name} {when} the launch: {value:.4g} ms, baseline {base:.4g} ms "
                    f"({change:+.1%}, limit {limit:.0%}{repeats})"
                )
    return lines


def _throttled(now: Mapping[str, str], past: Sequence[Mapping[str, str]]) -> str:
    """Throttled share and clocks as `report.ttft_stage.circumstances` stores them; empty when they do not differ."""
    share, clock = _number(now, "throttled_share"), _number(now, "sm_mhz")
    if share is None:
        return ""
    shares = [value for env in past if (value := _number(env, "throttled_share")) is not None]
    clocks = [value for env in past if (value := _number(env, "sm_mhz")) is not None]
    worst = GpuSummary("a GPU", 1, 1, 0, ("see the cell's report",), share, clock, None, None, None)
    verdict = judge_throttle(
        [worst],
        baseline_share=median(shares)
        if shares
        else 1.0,  # a baseline that does not know is not compared with
        baseline_mhz=median(clocks) if clocks else None,
    )
    return verdict.detail if verdict.status == "inconclusive" else ""


def _number(env: Mapping[str, str], name: str) -> float | None:
    try:
        value = float(env[name])
    except (KeyError, ValueError):
        return None
    return value if math.isfinite(value) else None
