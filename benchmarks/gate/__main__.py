"""How often the gate cries wolf and what it misses, beside other rules: `python -m benchmarks.gate`."""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path

from . import page
from .bars import Bar, best, named, others, power, rates, times
from .noise import SERIES, Noise
from .plot import power_plot
from .speed import judge_session, prepare
from .study import (
    LAUNCHES,
    PAIRED,
    QUIET,
    SCENARIOS,
    UNPAIRED,
    Each,
    Side,
    Study,
    alone,
    power_curve,
    run,
)

HEADS = (
    "quiet",
    "slow host",
    "tps -8 %",
    "ttft +15 %",
    "tpot +5 % all",
    "tpot +5 % 4/16",
    "tps -8 %, slow host",
)
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

YOUNG = (2, 3, 5, 8)
"""Launches of younger baselines."""


@dataclass
class Output:
    """What the command says: to the terminal and `tables.txt` as it goes, and as a page at the end."""

    printed: list[str] = field(default_factory=list)
    sections: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """One block of plain text."""
        print(text, flush=True)
        self.printed.append(text)

    def table(self, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table: aligned here, Markdown on the page."""
        widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
        lines = [
            f"{row[0]:<{widths[0]}}  "
            + "  ".join(f"{v:>{w}}" for v, w in zip(row[1:], widths[1:], strict=True))
            for row in [heads, *rows]
        ]
        self.say(f"\n{title}\n\n" + "\n".join(lines))
        self.sections.append(f"## {title[0].upper()}{title[1:]}\n\n{page.table(heads, rows)}")

    def bars(self, title: str, bars: Sequence[Bar], against: Sequence[str] = ()) -> None:
        """Promises and, where there is any, what speaks against them."""
        self.say(
            f"\n{title}\n\n" + "\n".join([*(bar.line() for bar in bars), *(f"  - {s}" for s in against)])
        )
        detail = f"\n\n{page.bullets(against)}" if against else ""
        self.sections.append(f"## {title[0].upper()}{title[1:]}\n\n{page.bar_list(bars)}{detail}")


def rows(study: Study, names: Sequence[str], *, count_named: bool) -> list[list[str]]:
    """One row a rule: red nights without a change, changes found (or found and named), mean launches a night."""
    figure = named if count_named else power
    found = []
    for name in names:
        tallies = [(scenario, study.tally(name, scenario.name)) for scenario in SCENARIOS]
        shares = [figure(tally) if scenario.change.cells else tally.red_rate for scenario, tally in tallies]
        cost = f"{study.tally(name, QUIET.name).launches_a_night:.2f}"
        found.append([name, *(f"{share:.2%}" for share in shares), cost])
    return found


def side_rows(studies: dict[str, Study]) -> list[list[str]]:
    """One row a side study, for the paired gate."""
    found = []
    for name, study in studies.items():
        tallies = [(scenario, study.tally(PAIRED, scenario.name)) for scenario in SCENARIOS]
        shares = [power(tally) if scenario.change.cells else tally.red_rate for scenario, tally in tallies]
        found.append([name, *(f"{share:.2%}" for share in shares)])
    return found


def session_times(repeats: int = 5) -> list[float]:
    """Seconds for the verdict of one session of 96 series; what they import is loaded already."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "baselines"
        results = prepare(root)
        return [judge_session(root, results).seconds for _ in range(repeats)]


def options_of() -> argparse.Namespace:
    """The command line; every knob of the noise is an option."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=__doc__)
    parser.add_argument(
        "--nights", type=int, default=10_000, help="virtual nights a scenario (default: 10000)"
    )
    parser.add_argument(
        "--fewest", type=int, default=500, help="nights a side study has at least (default: 500)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--jobs", type=int, default=2, help="processes, 1 for none beside this one (default: 2)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results", help="folder for tables, JSON and SVG"
    )
    parser.add_argument(
        "--page", type=Path, help="write the study as a page of the documentation too, its plot beside it"
    )
    for name, value in asdict(Noise()).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=float, default=value, help=f"noise (default: {value})"
        )
    return parser.parse_args()


def cpu_s() -> float:
    """CPU seconds of this process and of those it has waited for."""
    spent = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def main() -> int:
    """Run the study, print the tables, write `tables.txt`, `gate.json`, `power.svg` and, if asked, a page."""
    options = options_of()
    if options.jobs < 2:
        return study_of(options, map)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        return study_of(options, pool.map, pool)


def study_of(options: argparse.Namespace, each: Each, pool: Executor | None = None) -> int:
    """The whole command on one process or several."""
    noise = replace(Noise(), **{name: getattr(options, name) for name in asdict(Noise())})
    knobs = ", ".join(f"{name} {value:g}" for name, value in asdict(noise).items())
    session = session_times()
    began, cpu = time.perf_counter(), cpu_s()
    output = Output()
    output.say(
        f"{page.taken()}\n{options.nights} virtual nights a scenario, {SERIES} series a night, "
        f"baseline of {LAUNCHES} launches, seed {options.seed}\nnoise: {knobs}"
    )
    study = run(noise, options.nights, seed=options.seed, each=each)
    names, heads = [PAIRED, UNPAIRED, *others(study)], ["", *HEADS]
    title = "red nights without a change, and changes"
    output.table(f"{title} found", [*heads, "launches"], rows(study, names, count_named=False))
    output.table(f"{title} found and named", [*heads, "launches"], rows(study, names, count_named=True))
    output.bars("false alarms and power", rates(study))
    for word, figure in (("found", power), ("found and named", named)):
        bar, against = best(study, word, figure)
        output.bars(f"better than every other rule on both at once, by what is {word}", [bar], against)
    few = max(options.fewest, options.nights // 5)
    wanted = {
        name: Side(replace(noise, **changes), few, options.seed + 50) for name, changes in VARIANTS.items()
    } | {f"baseline of {count} launches": Side(noise, few, options.seed + 70, count) for count in YOUNG}
    sides = dict(zip(wanted, each(alone, wanted.values()), strict=True))
    output.table("this gate, paired, under other noise and on younger baselines", heads, side_rows(sides))
    curve = power_curve(noise, few, study.factors, LOSSES, options.seed + 90, each)
    if pool is not None:
        pool.shutdown()  # only then is the time of its processes counted
    wall, spent = time.perf_counter() - began, cpu_s() - cpu
    output.bars("time", times(options.nights, wall, spent, session))
    plot = power_plot(
        f"Chance to find a throughput loss in one night ({noise.night:.0%} night drift)", LOSSES, curve
    )
    content = {
        "taken": page.taken(),
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
                "named": t.named_rate,
                "launches": t.launches_a_night,
            }
            for (rule, scenario), t in study.tallies.items()
        ],
        "elsewhere": {
            name: {s.name: asdict(side.tally(PAIRED, s.name)) for s in SCENARIOS}
            for name, side in sides.items()
        },
        "losses": LOSSES,
        "power": curve,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "power.svg").write_text(plot)
    (options.out / "gate.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    (options.out / "tables.txt").write_text("\n".join(output.printed) + "\n")
    if options.page is not None:
        write_page(options.page, output, plot, options.nights, knobs)
    print(f"\n{options.out}: gate.json, power.svg, tables.txt; {wall:.0f} s, CPU {spent:.0f} s", flush=True)
    return 0


def write_page(path: Path, output: Output, plot: str, nights: int, knobs: str) -> None:
    """The page and its plot, `<page>-power.svg`."""
    picture = path.with_name(f"{path.stem}-power.svg")
    shown = os.path.relpath(path) if path.is_relative_to(Path.cwd()) or not path.is_absolute() else path.name
    head = page.INTRODUCTION.format(
        series=SERIES, launches=LAUNCHES, nights=f"{nights:,}", page=shown, taken=page.taken()
    )
    parts = [
        head.rstrip(),
        f"Noise, as standard deviations of ln(value): {knobs}.",
        f"![chance of finding a loss of throughput against its size]({picture.name})",
        *output.sections,
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(plot)
    path.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
