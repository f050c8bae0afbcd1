"""How often the gate cries wolf and what it misses, beside other rules: `python -m benchmarks.gate`."""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path

from .noise import SERIES, Noise
from .plot import power_plot
from .rules import OTHERS
from .study import (
    PAIRED,
    QUIET,
    SCENARIOS,
    SLOW_HOST,
    THROUGHPUT,
    TPOT_ALL,
    TPOT_SOME,
    TTFT,
    UNPAIRED,
    Study,
    matched,
    power_curve,
    run,
)

HEADS = ("quiet", "slow host", "tps -8 %", "ttft +15 %", "tpot +5 % all", "tpot +5 % 4/16")
LOSSES = (0.0, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.10, 0.12)
VARIANTS: dict[str, dict[str, float]] = {
    "no night drift": {"night": 0.0},
    "1 % night drift": {"night": 0.01},
    "3 % night drift": {"night": 0.03},
    "run noise x 2": {"run": 2.0},
    "launch noise x 10": {"launch": 0.01, "launch_cell": 0.01},
    "stragglers x 4": {"stragglers": 0.02},
    "assumed noise": {"observed": 0.0, "launch": 0.005, "launch_cell": 0.006},
}
"""Noise that the defaults do not have: how far the promises carry."""

TARGETS: tuple[tuple[str, str, str, float], ...] = (
    (PAIRED, QUIET.name, "red at most", 0.01),
    (UNPAIRED, QUIET.name, "red at most", 0.01),
    (PAIRED, SLOW_HOST.name, "red at most", 0.05),
    (PAIRED, THROUGHPUT.name, "found at least", 0.95),
    (PAIRED, TTFT.name, "found at least", 0.95),
    (PAIRED, TPOT_ALL.name, "found at least", 0.90),
    (PAIRED, TPOT_SOME.name, "found at least", 0.90),
)


def interval(share: float, count: int) -> str:
    """Half width of the 95 % interval of a share, in percent points (Wilson's centre is left out: counts
    are large).
    """
    return f"{196 * math.sqrt(max(share * (1 - share), 1 / count) / count):.2f}"


def table(study: Study) -> list[str]:
    """One line a rule: red nights without a change, power, cost."""
    heads = [*HEADS, "launches"]
    names = [PAIRED, UNPAIRED, *(rule.name for rule in OTHERS), *(matched(rule) for rule in OTHERS)]
    width = max(map(len, names))
    lines = [" " * width + "  " + "  ".join(f"{head:>14}" for head in heads)]
    for name in names:
        cells = []
        for scenario in SCENARIOS:
            tally = study.tally(name, scenario.name)
            share = tally.power if scenario.change.cells else tally.red_rate
            cells.append(f"{share:>14.2%}")
        cells.append(f"{study.tally(name, QUIET.name).launches_a_night:>14.2f}")
        lines.append(f"{name:<{width}}  " + "  ".join(cells))
    return lines


def reached(study: Study) -> list[str]:
    """Each target with what was reached, honestly."""
    lines = []
    for rule, scenario, sense, bound in TARGETS:
        tally = study.tally(rule, scenario)
        share = tally.red_rate if sense == "red at most" else tally.power
        ok = share <= bound if sense == "red at most" else share >= bound
        mark = "reached" if ok else "MISSED "
        lines.append(
            f"{mark}  {share:7.2%} +-{interval(share, tally.nights)}  {sense} {bound:.0%}  {rule}: {scenario}"
        )
    return lines


def side_by_side(study: Study) -> list[str]:
    """For each other rule: quiet red nights and power in every scenario with a change, theirs against ours."""
    changed = [scenario for scenario in SCENARIOS if scenario.change.cells]
    lines = []
    for rule in OTHERS:
        red, ours_red = study.tally(rule.name, QUIET.name).red_rate, study.tally(PAIRED, QUIET.name).red_rate
        gaps = [study.tally(PAIRED, s.name).power - study.tally(rule.name, s.name).power for s in changed]
        fewer = "fewer" if ours_red < red else "NOT fewer"
        more = sum(gap > 0 for gap in gaps)
        lines.append(
            f"{rule.name}: {fewer} false alarms ({ours_red:.2%} against {red:.2%}); finds more in {more} of "
            f"{len(gaps)} scenarios (" + ", ".join(f"{gap:+.1%}" for gap in gaps) + ")"
        )
    return lines


def main() -> int:
    """Run the study, print the tables, write `tables.txt`, `gate.json` and `power.svg`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=__doc__)
    parser.add_argument(
        "--nights", type=int, default=10_000, help="virtual nights a scenario (default: 10000)"
    )
    parser.add_argument(
        "--fewest", type=int, default=500, help="nights a side study has at least (default: 500)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results", help="folder for tables, JSON and SVG"
    )
    knobs = Noise()
    for name, value in asdict(knobs).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=float, default=value, help=f"noise (default: {value})"
        )
    options = parser.parse_args()
    noise = replace(knobs, **{name: getattr(options, name) for name in asdict(knobs)})
    started = time.perf_counter()
    printed: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        printed.append(text)

    say(f"{options.nights} virtual nights a scenario, {SERIES} series a night, baseline of 11 launches")
    say("noise: " + ", ".join(f"{name} {value:g}" for name, value in asdict(noise).items()))
    study = run(noise, options.nights, seed=options.seed)
    say(f"\nred nights without a change, and true changes found (night drift {noise.night:.0%})\n")
    say("\n".join(table(study)))
    say("\ntargets\n")
    say("\n".join(reached(study)))
    say("\nthis gate, paired, against each rule as it is used (difference of power in brackets)\n")
    say("\n".join(side_by_side(study)))
    say("\nthis gate, paired, under other noise\n")
    few = max(options.fewest, options.nights // 5)
    elsewhere = {}
    say(" " * 16 + "  " + "  ".join(f"{head:>14}" for head in HEADS))
    for name, changes in VARIANTS.items():
        other = run(replace(noise, **changes), few, seed=options.seed + 50)
        tallies = [(s, other.tally(PAIRED, s.name)) for s in SCENARIOS]
        shares = {s.name: t.power if s.change.cells else t.red_rate for s, t in tallies}
        elsewhere[name] = shares
        say(f"{name:<16}  " + "  ".join(f"{share:>14.2%}" for share in shares.values()))
    curve = power_curve(noise, few, study.factors, LOSSES, options.seed + 90)
    options.out.mkdir(parents=True, exist_ok=True)
    title = f"Chance to find a throughput loss in one night ({noise.night:.0%} night drift)"
    (options.out / "power.svg").write_text(power_plot(title, LOSSES, curve))
    content = {
        "nights": options.nights,
        "seed": options.seed,
        "noise": asdict(noise),
        "factors": study.factors,
        "results": [
            {
                "rule": rule,
                "scenario": scenario,
                "red": t.red_rate,
                "found": t.power,
                "launches": t.launches_a_night,
            }
            for (rule, scenario), t in study.tallies.items()
        ],
        "elsewhere": elsewhere,
        "losses": LOSSES,
        "power": curve,
    }
    (options.out / "gate.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    (options.out / "tables.txt").write_text("\n".join(printed) + "\n")
    seconds = time.perf_counter() - started
    print(f"\n{options.out}: gate.json, power.svg, tables.txt; {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
