"""False-alarm rate and power of the gate and of other rules over the same virtual nights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .noise import NOTHING, Change, Generator, Nights, Noise
from .rules import OTHERS, Flags, Rule, Stored, ours, statistic

LAUNCHES = 11
"""In a baseline, unless said otherwise."""

CHUNK = 500
"""Nights drawn at a time, to bound memory."""

MATCHED_RATE = 0.01
"""Nightly false-alarm rate at which power is compared."""

PAIRED = "this gate, paired A B B A"
UNPAIRED = "this gate, unpaired"


def loss(share: float) -> float:
    """Score of losing a share of a higher-is-better metric."""
    return -math.log1p(-share)


@dataclass(frozen=True)
class Scenario:
    """What truly happens, and what is asked of the gate."""

    name: str
    change: Change = NOTHING
    slow_host: float = 0.0
    sessions: int = 1
    """Nights within which a decision counts."""


QUIET = Scenario("nothing changed")
SLOW_HOST = Scenario("nothing changed, host 10 % slow all night", slow_host=math.log(1.10))
THROUGHPUT = Scenario("output_tps -8 % in 4 of 16 cells", Change("output_tps", loss(0.08), 4))
TTFT = Scenario("ttft_ms_p50 +15 % in 4 of 16 cells", Change("ttft_ms_p50", math.log(1.15), 4))
TPOT_ALL = Scenario(
    "tpot_ms_p50 +5 % in all cells, 3 nights", Change("tpot_ms_p50", math.log(1.05), 16), sessions=3
)
TPOT_SOME = Scenario(
    "tpot_ms_p50 +5 % in 4 of 16 cells, 3 nights", Change("tpot_ms_p50", math.log(1.05), 4), sessions=3
)
SLOW_LOSS = Scenario(
    "output_tps -8 % in 4 of 16 cells, host 10 % slow all night",
    Change("output_tps", loss(0.08), 4),
    slow_host=math.log(1.10),
)
SCENARIOS = (QUIET, SLOW_HOST, THROUGHPUT, TTFT, TPOT_ALL, TPOT_SOME, SLOW_LOSS)


@dataclass
class Tally:
    """Red nights of one rule in one scenario, counted."""

    nights: int = 0
    red: int = 0
    """Nights (or groups of nights) with any red series."""
    found: int = 0
    """Those in which a series that truly changed is red."""
    named: int = 0
    """Those of `found` in which no other series is red: who reads the night is sent to the change and nowhere else."""
    launches: float = 0.0

    def add(self, flags: Sequence[Flags], change: Change, launches: float) -> None:
        """`flags`: one array (nights, SERIES) a session."""
        together = np.stack(flags)
        self.nights += together.shape[1]
        self.red += int(together.any(axis=(0, 2)).sum())
        found = together[..., change.affected].any(axis=(0, 2))
        blamed = together[..., ~change.affected].any(axis=(0, 2))
        self.found += int(found.sum())
        self.named += int((found & ~blamed).sum())
        self.launches += launches * together.shape[1]

    @property
    def red_rate(self) -> float:
        """Share of nights that are red at all."""
        return self.red / self.nights

    @property
    def power(self) -> float:
        """Share in which a true change is found."""
        return self.found / self.nights

    @property
    def named_rate(self) -> float:
        """Share in which a true change is found and nothing else is accused."""
        return self.named / self.nights

    @property
    def launches_a_night(self) -> float:
        """Mean cost."""
        return self.launches / self.nights


@dataclass
class Study:
    """Results by (rule name, scenario name)."""

    noise: Noise
    nights: int
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    """Threshold multiplier of each other rule at which its false-alarm rate is MATCHED_RATE."""

    def tally(self, rule: str, scenario: str) -> Tally:
        """The counts of one rule in one scenario."""
        return self.tallies.setdefault((rule, scenario), Tally())


def matched(rule: Rule) -> str:
    """Name of a rule whose threshold was widened until it is as quiet as MATCHED_RATE."""
    return f"{rule.name}, at {MATCHED_RATE:.0%} false alarms"


def chunks(
    noise: Noise, nights: int, scenario: Scenario, seed: int, launches: int = LAUNCHES
) -> list[Callable[[], Nights]]:
    """One function a chunk of nights; each draws the same nights whenever it is called."""
    sizes = [min(CHUNK, nights - start) for start in range(0, nights, CHUNK)]

    def drawer(index: int, size: int) -> Callable[[], Nights]:
        return lambda: Generator(seed * 100_003 + index, noise).draw(
            size,
            scenario.change,
            slow_host=scenario.slow_host,
            sessions=scenario.sessions,
            launches=launches,
        )

    return [drawer(index, size) for index, size in enumerate(sizes)]


def calibrate(noise: Noise, nights: int, seed: int) -> dict[str, float]:
    """For each other rule the factor on its threshold at which quiet nights are red with MATCHED_RATE.

    Found on nights that are used for nothing else. A factor below 1 is kept at 1: no rule is made louder.
    """
    worst: dict[str, list[np.ndarray]] = {rule.name: [] for rule in OTHERS}
    for draw in chunks(noise, nights, QUIET, seed):
        drawn = draw()
        stored = Stored.of(drawn.baseline)
        for rule in OTHERS:
            worst[rule.name].append(statistic(rule, stored, drawn.sessions[0]).max(axis=1))
    return {
        name: max(1.0, float(np.quantile(np.concatenate(parts), 1 - MATCHED_RATE)))
        for name, parts in worst.items()
    }


Each = Callable[..., Iterable[Any]]
"""`map`, or that of a pool of processes: scenarios know nothing of each other."""


def run(
    noise: Noise,
    nights: int,
    scenarios: Sequence[Scenario] = SCENARIOS,
    seed: int = 1,
    each: Each = map,
) -> Study:
    """Draw `nights` nights a scenario and count what each rule makes of them."""
    study = Study(noise, nights)
    study.factors = calibrate(noise, nights, seed)
    tasks = [
        (noise, nights, scenario, seed + number, study.factors)
        for number, scenario in enumerate(scenarios, start=1)
    ]
    for tallies in each(_of_scenario, tasks):
        study.tallies |= tallies
    return study


def _of_scenario(
    task: tuple[Noise, int, Scenario, int, dict[str, float]],
) -> dict[tuple[str, str], Tally]:
    noise, nights, scenario, seed, factors = task
    study = Study(noise, nights, factors=factors)
    for draw in chunks(noise, nights, scenario, seed):
        _count(study, scenario, draw())
    return study.tallies


def _count(study: Study, scenario: Scenario, drawn: Nights) -> None:
    stored = _judge(study, scenario, drawn, ((PAIRED, True), (UNPAIRED, False)))
    for rule in OTHERS:
        values = [statistic(rule, stored, session) for session in drawn.sessions]
        study.tally(rule.name, scenario.name).add([v > 1 for v in values], scenario.change, rule.launches)
        quiet = [v > study.factors[rule.name] for v in values]
        study.tally(matched(rule), scenario.name).add(quiet, scenario.change, rule.launches)


def _judge(study: Study, scenario: Scenario, drawn: Nights, designs: Sequence[tuple[str, bool]]) -> Stored:
    stored = Stored.of(drawn.baseline)
    for name, paired in designs:
        judged = [ours(stored, session, paired=paired) for session in drawn.sessions]
        launches = sum(one.launches for one in judged) / len(judged)
        study.tally(name, scenario.name).add([one.failed for one in judged], scenario.change, launches)
    return stored


@dataclass(frozen=True)
class Side:
    """A side study: other noise, or younger baselines."""

    noise: Noise
    nights: int
    seed: int
    launches: int = LAUNCHES


def alone(side: Side) -> Study:
    """The gate with a reference build in every scenario, without the other rules."""
    noise, nights, seed, launches = side.noise, side.nights, side.seed, side.launches
    study = Study(noise, nights)
    for number, scenario in enumerate(SCENARIOS, start=1):
        for draw in chunks(noise, nights, scenario, seed + number, launches):
            _judge(study, scenario, draw(), ((PAIRED, True),))
    return study


def power_curve(
    noise: Noise,
    nights: int,
    factors: dict[str, float],
    losses: Sequence[float],
    seed: int = 91,
    each: Each = map,
) -> dict[str, list[float]]:
    """Power against a throughput loss in 4 of 16 cells, for the gate and for each rule at MATCHED_RATE."""
    curve: dict[str, list[float]] = {}
    scenarios = [Scenario("curve", Change("output_tps", loss(share), 4)) for share in losses]
    for tallies in each(_of_scenario, [(noise, nights, one, seed, factors) for one in scenarios]):
        for name in (PAIRED, UNPAIRED, *(matched(rule) for rule in OTHERS)):
            curve.setdefault(name, []).append(tallies[name, "curve"].power)
    return curve
