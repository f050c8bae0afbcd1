"""Stage 2 of the gate in practice: fresh launches for what stage 1 suspects, then one decision for the session."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from .bench import Bench, TopologyLaunch
from .errors import BringUpError, RoleDied, UsageProblem
from .gate.adapter import readings_of
from .gate.confirm import Confirmation, Readings, StagePlan, Suspect, apply_confirmations, decide, plan
from .gate.mask import unmask
from .gate.statistics import Pooled
from .gate.verdict import CellVerdict, Verdict, worst
from .judging import JudgedCell, Judging
from .measure.cell_result import CellResult
from .options import Settings

FRESH = 1000
"""Launch numbers from here on belong to stage 2, so that they never meet those of `--launches`."""

COMPARED = frozenset({Verdict.PASS, Verdict.NOISY, Verdict.IMPROVED})


class Confirming:
    """Decides the session's suspects, once. Measures on the session's own bench, one topology after the other."""

    def __init__(
        self,
        settings: Settings,
        bench: Bench,
        judging: Judging,
        workload: str,
        progress: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mode: str = settings["confirm"]
        self._paired = bool(settings["reference"])
        self._budget_s: float | None = settings["budget"]
        self._bench = bench
        self._judging = judging
        self._workload = workload
        self._progress = progress
        self._clock = clock
        self._began = clock()
        self._launched = 0

    @property
    def enabled(self) -> bool:
        """False with `--confirm never`: then stage 1 has the last word."""
        return self._mode != "never"

    def pending(self, cell: JudgedCell) -> bool:
        """True when this cell's item has to wait for fresh launches."""
        return self.enabled and bool(self._judging.suspects(cell))

    def settle(self, cell: JudgedCell) -> None:
        """Without stage 2 a suspect's first measurement is the last word, and its rows say so."""
        cell.verdict = _with_rows(
            cell.verdict, Verdict.SUSPECT, Verdict.FAIL, "one launch, not measured again (--confirm never)"
        )

    def run(self) -> list[JudgedCell]:
        """Launch, measure, decide. Returns the cells whose verdict this has settled; nothing to do is an empty list."""
        if not self.enabled:
            return []
        cells = self._widened(self._judging.cells)
        suspects = {cell.id: self._judging.suspects(cell) for cell in cells}
        waiting = [cell for cell in cells if suspects[cell.id]]
        if not waiting:
            return []
        readings: dict[tuple[str, str], Readings] = {}
        within: dict[str, Pooled] = {}
        plans: dict[str, StagePlan] = {}
        by_topology: dict[str, list[JudgedCell]] = {}
        for cell in waiting:
            by_topology.setdefault(cell.topology.name, []).append(cell)
        # Where most is undecided, a launch decides most; a budget then leaves out the rest.
        order = sorted(by_topology.values(), key=lambda group: -sum(len(suspects[cell.id]) for cell in group))
        for group in order:
            found = [suspect for cell in group for suspect in suspects[cell.id]]
            stage = plan(found, has_reference=self._paired)
            assert stage is not None, "a group without suspects"
            plans[group[0].topology.name] = stage
            readings |= readings_of(found, self._measure(group, stage))
            for metric, pooled in self._judging.store.sessions(group[0].key).items():
                within[metric] = _joined(within.get(metric), pooled)
        every = [suspect for cell in waiting for suspect in suspects[cell.id]]
        confirmations = decide(next(iter(plans.values())).design, every, readings, within)
        for cell in waiting:
            cell.verdict = self._decided(cell, suspects[cell.id], confirmations)
        return waiting

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

    def _measure(
        self, group: Sequence[JudgedCell], stage: StagePlan
    ) -> list[tuple[str, dict[str, CellResult]]]:
        """Fresh launches of one topology; a launch that fails or does not fit the budget leaves a hole."""
        topology = group[0].topology
        launches: list[tuple[str, dict[str, CellResult]]] = []
        self._progress(f"{topology.name}: {stage.why}")
        longest = 0.0
        for arm in stage.order:
            if self._budget_s is not None and self._clock() - self._began + longest > self._budget_s:
                self._progress(f"{topology.name}: the budget is used up; what is open stays SUSPECT")
                break
            self._launched += 1
            began = self._clock()
            results: dict[str, CellResult] = {}
            try:
                self._bench.begin(TopologyLaunch(topology, FRESH + self._launched, reference=arm == "A"))
                for cell in group:
                    results[cell.id] = self._bench.measure_cell(cell.result.cell, self._workload)
            except (BringUpError, RoleDied, UsageProblem) as problem:
                self._progress(f"{topology.name}: fresh launch failed: {str(problem).splitlines()[0]}")
            finally:
                self._bench.drop()
            launches.append((arm, results))
            longest = max(longest, self._clock() - began)
        return launches

    def _decided(
        self, cell: JudgedCell, suspects: Sequence[Suspect], confirmations: Sequence[Confirmation]
    ) -> CellVerdict:
        mine = [one for one in confirmations if one.suspect in suspects]
        return apply_confirmations(cell.id, cell.verdict, mine)


def _with_rows(verdict: CellVerdict, old: Verdict, new: Verdict, note: str) -> CellVerdict:
    rows = tuple(
        replace(row, verdict=new, note="; ".join(part for part in (row.note, note) if part))
        if row.verdict is old and row.baseline is not None
        else row
        for row in verdict.rows
    )
    return CellVerdict(rows=rows, verdict=worst([row.verdict for row in rows]))


def _joined(first: Pooled | None, second: Pooled) -> Pooled:
    """Variance pooled over both, weighted with the degrees of freedom."""
    if first is None or first.freedom + second.freedom == 0:
        return second
    freedom = first.freedom + second.freedom
    return Pooled((first.variance * first.freedom + second.variance * second.freedom) / freedom, freedom)
