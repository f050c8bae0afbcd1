"""What the gate promises, and whether the study finds it so: each bar is MET or NOT MET, with its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .rules import OTHERS
from .study import (
    PAIRED,
    QUIET,
    SLOW_HOST,
    THROUGHPUT,
    TPOT_ALL,
    TPOT_SOME,
    TTFT,
    UNPAIRED,
    Scenario,
    Study,
    Tally,
    matched,
)

Figure = Callable[[Tally], float]


def power(tally: Tally) -> float:
    """Share of nights in which a true change is found."""
    return tally.power


def named(tally: Tally) -> float:
    """Share of nights in which it is found and nothing else accused."""
    return tally.named_rate


AT_MOST: tuple[tuple[str, Scenario, float], ...] = (
    (PAIRED, QUIET, 0.01),
    (UNPAIRED, QUIET, 0.01),
    (PAIRED, SLOW_HOST, 0.05),
)
AT_LEAST: tuple[tuple[str, Scenario, float], ...] = (
    (PAIRED, THROUGHPUT, 0.95),
    (PAIRED, TTFT, 0.95),
    (PAIRED, TPOT_ALL, 0.90),
    (PAIRED, TPOT_SOME, 0.90),
)
CHANGED = tuple(scenario for _, scenario, _ in AT_LEAST)
STUDY_S = 300.0
"""10,000 nights a scenario must be judged within this wall time, on two cores."""
SESSION_S = 1.0
"""One session of 96 series must be judged within this."""


@dataclass(frozen=True)
class Bar:
    """One promise, held against what was measured."""

    met: bool
    seen: str
    asked: str

    @property
    def word(self) -> str:
        """`MET` or `NOT MET`."""
        return "MET" if self.met else "NOT MET"

    def line(self) -> str:
        """`MET      0.42% +-0.13  red at most 1%  this gate: nothing changed`."""
        return f"{self.word:<8} {self.seen:<16} {self.asked}"


def interval(share: float, count: int) -> str:
    """Half width of the 95 % interval of a share, in percent points (Wilson's centre is left out: counts
    are large).
    """
    return f"{196 * math.sqrt(max(share * (1 - share), 1 / count) / count):.2f}"


def _shown(share: float, count: int) -> str:
    return f"{share:.2%} +-{interval(share, count)}"


def rates(study: Study) -> list[Bar]:
    """False alarms and power, the latter also as found and named."""
    found = []
    for rule, scenario, bound in AT_MOST:
        tally = study.tally(rule, scenario.name)
        share = tally.red_rate
        asked = f"red at most {bound:.0%}  {rule}: {scenario.name}"
        found.append(Bar(share <= bound, _shown(share, tally.nights), asked))
    for rule, scenario, bound in AT_LEAST:
        tally = study.tally(rule, scenario.name)
        for word, figure in (("found", power), ("found and named", named)):
            share = figure(tally)
            asked = f"{word} at least {bound:.0%}  {rule}: {scenario.name}"
            found.append(Bar(share >= bound, _shown(share, tally.nights), asked))
    return found


def others(study: Study) -> list[str]:
    """Every other rule, as it is used and made as quiet as the promise."""
    return [*(rule.name for rule in OTHERS), *(matched(rule) for rule in OTHERS)]


def shortfalls(study: Study, rule: str, figure: Figure) -> list[str]:
    """Where another rule is as good as ours or better: red nights without a change, and changes by `figure`."""
    lost = []
    for scenario in (QUIET, SLOW_HOST):
        mine, theirs = study.tally(PAIRED, scenario.name).red_rate, study.tally(rule, scenario.name).red_rate
        if mine >= theirs:
            lost.append(f"{scenario.name}: red {mine:.2%} against {theirs:.2%}")
    for scenario in CHANGED:
        ours, other = (figure(study.tally(name, scenario.name)) for name in (PAIRED, rule))
        if ours <= other:
            lost.append(f"{scenario.name}: {ours:.2%} against {other:.2%}")
    return lost


def best(study: Study, word: str, figure: Figure) -> tuple[Bar, list[str]]:
    """Whether ours has fewer red nights than every other rule, and at once finds more; what speaks against it."""
    names = others(study)
    lost = {name: shortfalls(study, name, figure) for name in names}
    beaten = sum(not where for where in lost.values())
    bar = Bar(
        beaten == len(names),
        f"{beaten} of {len(names)}",
        f"rules have more red nights without a change (also on a slow host), and at once less {word}",
    )
    return bar, [f"{name}: {where}" for name, places in lost.items() for where in places]


def times(nights: int, wall_s: float, cpu_s: float, session_s: Sequence[float]) -> list[Bar]:
    """How long the study and one session's verdict took; `session_s` in the order in which they were timed."""
    return [
        Bar(
            wall_s < STUDY_S,
            f"{wall_s:.0f} s",
            f"(CPU {cpu_s:.0f} s) for {nights} nights a scenario, under {STUDY_S:.0f} s",
        ),
        Bar(
            max(session_s) < SESSION_S,
            f"{max(session_s):.2f} s",
            f"(fastest {min(session_s):.3f} s) for the verdict of one session of 96 series, under {SESSION_S:.0f} s",
        ),
    ]
