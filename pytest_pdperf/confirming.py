"""Stage 2 of the gate in practice: fresh launches for what stage 1 suspects, then one decision for the session."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from .errors import BringUpError, CannotKeep, RoleDied, UsageProblem
from .evidence.canary import differences
from .gate.adapter import readings_of
from .gate.budget import Series, spend
from .gate.confirm import (
    Confirmation,
    Design,
    Readings,
    StagePlan,
    Suspect,
    apply_confirmations,
    decide,
    plan,
)
from .gate.mask import unmask
from .gate.statistics import Share, log_score
from .gate.verdict import CellVerdict, Verdict, worst
from .inputs import Inputs
from .judging import JudgedCell, Judging
from .measure.cell_result import CellResult
from .measuring import Measured, TopologyLaunch
from .options import Settings
from .report.outcomes import file_of
from .report.source import STAGE_2
from .report.ttft_stage import circumstances
from .run_files import RunFiles

FRESH = STAGE_2
"""Launch numbers from here on belong to stage 2, so that they never meet those of `--launches`."""

COMPARED = frozenset({Verdict.PASS, Verdict.NOISY, Verdict.IMPROVED})

OUT_OF_BUDGET = "the budget is used up"

CONFIRMATION = "confirmation"
"""Folder of a run for what fresh launches measured. Beside `cells`, whose files each stand for a test item."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a fresh launch measured of a cell, as it lies on disk."""

    path: Path
    circumstances: Mapping[str, str]
    """GPU clocks and the like, as a stored launch has them."""


Keep = Callable[[TopologyLaunch, Measured], Kept]


def kept_in(files: RunFiles, inputs: Inputs) -> Keep:
    """Keep what fresh launches measure in files of their own, so that a verdict can be looked into."""

    def keep(launch: TopologyLaunch, measured: Measured) -> Kept:
        outcome = measured.outcome(launch, inputs.engines[launch.topology.name].name)
        name, page = file_of(outcome)
        path = files.folder / CONFIRMATION / name
        files.put(path, page)
        return Kept(path, circumstances(outcome))

    return keep


class Launcher(Protocol):
    """What stage 2 needs of the bench."""

    relaunches: bool
    """False where `begin` cannot bring up anything fresh."""

    def begin(self, launch_: TopologyLaunch) -> None:
        """Make a launch the current one."""

    def measure_cell(self, cell_id: str, workload: str) -> Measured:
        """Run a cell on the current launch."""

    def drop(self) -> None:
        """Stop the current launch; what is left of it becomes a problem of the run."""

    def surroundings(self, launch_id: str) -> Mapping[str, str]:
        """Canaries of a launch, for `evidence.canary.differences`."""

    def bring_up_s(self, topology: str) -> float | None:
        """How long the topology's latest bring-up took; None before the first."""


class Confirming:
    """Decides the session's suspects, once. Measures on the session's own bench, one topology after the other."""

    def __init__(
        self,
        settings: Settings,
        bench: Launcher,
        judging: Judging,
        workload: str,
        progress: Callable[..., None],
        keep: Keep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mode: str = settings["confirm"]
        self._paired = bool(settings["reference"])
        self._budget_s: float | None = settings["budget"]
        self._bench = bench
        self._judging = judging
        self._workload = workload
        self._progress = progress
        self._keep = keep
        self._clock = clock
        self._began = clock()
        self._launched = 0
        self._skipped: set[str] = set()
        """Topologies whose launches did not fit the budget."""
        self._elsewhere: dict[str, str] = {}
        """Cell -> why a fresh launch of it does not count."""
        self._files: dict[str, list[Path]] = {}

    @property
    def enabled(self) -> bool:
        """False with `--confirm never`: then stage 1 has the last word."""
        return self._mode != "never"

    def pending(self, cell: JudgedCell) -> bool:
        """True when this cell's item has to wait for fresh launches."""
        return self.enabled and bool(self._judging.suspects(cell))

    def kept(self, cell: JudgedCell) -> tuple[Path, ...]:
        """Files with what fresh launches measured of a cell, in launch order."""
        return tuple(self._files.get(cell.id, ()))

    def settle(self, cell: JudgedCell) -> None:
        """Without stage 2 a suspect's first measurement is the last word, and its rows say so."""
        cell.verdict = _with_rows(
            cell.verdict, Verdict.SUSPECT, Verdict.FAIL, "one launch, not measured again (--confirm never)"
        )

    def run(self) -> list[JudgedCell]:
        """Launch, measure, decide. Returns the cells whose verdict this has settled; nothing to do is an empty list.

        Cells whose launch ended on a machine that had changed come first: they are inconclusive, and not confirmed.
        """
        withdrawn = [cell for cell in self._judging.cells if self._ended_elsewhere(cell)]
        if not self.enabled:
            return withdrawn
        cells = self._widened(self._judging.cells)
        suspects = {cell.id: self._judging.suspects(cell) for cell in cells}
        waiting = [cell for cell in cells if suspects[cell.id]]
        if not waiting:
            return withdrawn
        unpaired = Design.UNPAIRED if self._bench.relaunches else Design.REPEATED
        design = Design.PAIRED if self._paired else unpaired
        readings: dict[tuple[str, str], Readings] = {}
        within: dict[str, list[tuple[float, int]]] = {}
        for group in self._ordered(waiting, suspects):
            found = [suspect for cell in group for suspect in suspects[cell.id]]
            stage = self._plan(found)
            if self._fits(group, stage, found):
                readings |= readings_of(found, self._measure(group, stage))
            for metric, share in self._judging.store.sessions(group[0].key).items():
                within.setdefault(metric, []).append((share.value, share.freedom))
        every = [suspect for cell in waiting for suspect in suspects[cell.id]]
        shares = {metric: Share.of(parts) for metric, parts in within.items()}
        confirmations = decide(design, every, readings, shares)
        for cell in waiting:
            cell.verdict = self._decided(cell, suspects[cell.id], confirmations)
        return [*withdrawn, *waiting]

    def _ended_elsewhere(self, cell: JudgedCell) -> bool:
        launch = TopologyLaunch(cell.topology, cell.launch)
        return self._judging.recheck(cell, self._bench.surroundings(launch.id))

    def _widened(self, cells: Sequence[JudgedCell]) -> list[JudgedCell]:
        """Turn more series into suspects: all of them, or with a reference build those that a fast night hides."""
        if self._mode == "all":
            for cell in cells:
                for verdict in COMPARED:
                    cell.verdict = _with_rows(cell.verdict, verdict, Verdict.SUSPECT, "")
        elif self._paired:
            seen = unmask({cell.id: cell.verdict for cell in cells})
            for cell in cells:
                cell.verdict = seen[cell.id]
        return list(cells)

    # -- what to launch ------------------------------------------------------------------------------------

    def _plan(self, found: Sequence[Suspect]) -> StagePlan:
        stage = plan(found, has_reference=self._paired, relaunches=self._bench.relaunches)
        assert stage is not None, "a group without suspects"
        return stage

    def _ordered(
        self, waiting: Sequence[JudgedCell], suspects: Mapping[str, Sequence[Suspect]]
    ) -> list[list[JudgedCell]]:
        """The waiting cells by topology, in the order in which they get their launches.

        All launches of a plan or none: half a plan decides nothing. With a budget those come first that settle most
        doubt a second (`gate.budget.spend`); a suspect far beyond its limit is red with and without them, so clear
        cases follow, most series a second first.
        """
        groups: dict[str, list[JudgedCell]] = {}
        for cell in waiting:
            groups.setdefault(cell.topology.name, []).append(cell)
        counts = {name: sum(len(suspects[cell.id]) for cell in group) for name, group in groups.items()}
        if self._budget_s is None:
            return sorted(groups.values(), key=lambda group: -counts[group[0].topology.name])
        costs = {
            name: self._cost(group, self._plan([s for cell in group for s in suspects[cell.id]]))
            for name, group in groups.items()
        }
        doubts = {
            name: [series for cell in group for series in _series(cell, suspects[cell.id])]
            for name, group in groups.items()
        }
        first = [one.topology for one in spend(doubts, costs, self._left(), most=1)]
        rest = sorted(groups.keys() - first, key=lambda name: (-counts[name] / costs[name], name))
        return [groups[name] for name in (*first, *rest)]

    def _cost(self, group: Sequence[JudgedCell], stage: StagePlan) -> float:
        """Seconds that a plan is expected to take: bring-ups and cells as long as they took in stage 1."""
        bring_up = self._bench.bring_up_s(group[0].topology.name) or 0.0
        cells = sum(cell.result.wall_s or 0.0 for cell in group)
        return max(len(stage.order) * (bring_up + cells), 0.001)

    def _left(self) -> float:
        assert self._budget_s is not None, "no budget"
        return self._began + self._budget_s - self._clock()

    def _fits(self, group: Sequence[JudgedCell], stage: StagePlan, found: Sequence[Suspect]) -> bool:
        """Whether the budget has room for a plan; if not, says what stays open."""
        if self._budget_s is None:
            return True
        cost, left = self._cost(group, stage), self._left()
        if cost <= left:
            return True
        name = group[0].topology.name
        self._skipped.add(name)
        lost = ", ".join(f"{suspect.cell.split()[1]} {suspect.metric}" for suspect in found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        launches = f"{len(stage.order)} launches take about {cost:.0f} s"
        self._progress(
            f"{name}: {OUT_OF_BUDGET} ({max(left, 0):.0f} s left, {launches}); "
            f"{len(found)} series stay SUSPECT: {lost}{more}"
        )
        return False

    def _measure(
        self, group: Sequence[JudgedCell], stage: StagePlan
    ) -> list[tuple[str, dict[str, CellResult]]]:
        """Fresh launches of one topology; one that fails, does not fit the budget or met another machine is a hole."""
        topology = group[0].topology
        launches: list[tuple[str, dict[str, CellResult]]] = []
        self._progress(f"{topology.name}: {stage.why}")
        longest = 0.0
        met: dict[str, list[Mapping[str, str]]] = {
            cell.id: [launch.environment for launch in cell.baseline.launches]
            if cell.baseline and not self._paired
            else []
            for cell in group
        }
        for arm in stage.order:
            if self._budget_s is not None and longest > self._left():
                self._progress(f"{topology.name}: {OUT_OF_BUDGET}; what is open stays SUSPECT")
                self._skipped.add(topology.name)
                break
            self._launched += 1
            began = self._clock()
            launch = TopologyLaunch(topology, FRESH + self._launched, reference=arm == "A")
            launches.append((arm, self._comparable(launch, self._launch(launch, group), met)))
            longest = max(longest, self._clock() - began)
        return launches

    def _launch(
        self, launch: TopologyLaunch, group: Sequence[JudgedCell]
    ) -> dict[str, tuple[CellResult, Mapping[str, str]]]:
        """Cell -> what one fresh launch measured and under which circumstances; what it did not get to is missing."""
        found: dict[str, tuple[CellResult, Mapping[str, str]]] = {}
        try:
            self._bench.begin(launch)
            for cell in group:
                measured = self._bench.measure_cell(cell.result.cell, self._workload)
                kept = self._keep(launch, measured)
                self._files.setdefault(cell.id, []).append(kept.path)
                found[cell.id] = (measured.result, kept.circumstances)
        except (BringUpError, CannotKeep, RoleDied, UsageProblem) as problem:
            self._progress(f"{launch.topology.name}: fresh launch failed: {str(problem).splitlines()[0]}")
        finally:
            self._bench.drop()
        return found

    def _comparable(
        self,
        launch: TopologyLaunch,
        found: Mapping[str, tuple[CellResult, Mapping[str, str]]],
        met: Mapping[str, list[Mapping[str, str]]],
    ) -> dict[str, CellResult]:
        """The results that met the machine of `met` (cell -> circumstances so far), canaries, clocks and throttling."""
        machine = self._bench.surroundings(launch.id)
        results, reasons = {}, []
        for cell, (result, circumstance) in found.items():
            now = {**machine, **circumstance}
            if why := differences(now, met[cell]):
                reasons.append(why[0])
                self._elsewhere.setdefault(cell, why[0])
                continue
            results[cell] = result
            if self._paired:
                met[cell].append(now)  # the arms have to meet one machine, whatever the baseline's was
        for why_not in dict.fromkeys(reasons):
            self._progress(f"{launch.topology.name}: fresh launch does not count: {why_not}")
        return results

    def _decided(
        self, cell: JudgedCell, suspects: Sequence[Suspect], confirmations: Sequence[Confirmation]
    ) -> CellVerdict:
        mine = [one for one in confirmations if one.suspect in suspects]
        if cell.topology.name in self._skipped:
            mine = [one if one.complete else replace(one, note=OUT_OF_BUDGET) for one in mine]
        elif why := self._elsewhere.get(cell.id):
            note = f"a fresh launch met another machine: {why}"
            mine = [one if one.complete else replace(one, note=note) for one in mine]
        return apply_confirmations(cell.id, cell.verdict, mine)


def _series(cell: JudgedCell, suspects: Sequence[Suspect]) -> list[Series]:
    """The suspects of a cell as `gate.budget` wants them."""
    values = {row.metric: row.value for row in cell.verdict.rows}
    return [
        Series(
            cell=one.cell,
            metric=one.metric,
            difference=log_score(value, one.direction) - one.center,
            tolerance=one.tolerance,
            s2=one.variance,
            launches=one.launches,
        )
        for one in suspects
        if (value := values.get(one.metric)) is not None
    ]


def _with_rows(verdict: CellVerdict, old: Verdict, new: Verdict, note: str) -> CellVerdict:
    rows = tuple(
        replace(row, verdict=new, note="; ".join(part for part in (row.note, note) if part))
        if row.verdict is old and row.baseline is not None
        else row
        for row in verdict.rows
    )
    return CellVerdict(rows=rows, verdict=worst([row.verdict for row in rows]))
