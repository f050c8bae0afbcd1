"""Between a measured cell and the gate: which baseline it belongs to, what the item's outcome is, what is stored."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from .errors import UsageProblem
from .evidence.canary import differences
from .gate.adapter import judge, suspects_of
from .gate.baseline import CellBaseline, Launch
from .gate.catalogue import nearest, spec_of
from .gate.confirm import Suspect
from .gate.fingerprint import BaselineKey, CellRef, digest_of
from .gate.history import HistoryEntry
from .gate.judge import set_aside
from .gate.store import BaselineStore
from .gate.update import Mode, Outcome
from .gate.verdict import VERDICTS, CellVerdict, Verdict, blocks
from .inputs import Inputs
from .measure.cell_result import CellResult
from .measure.table import DEFINITIONS, METRICS
from .options import Settings
from .provenance import Hardware, LaunchRecord
from .spec.topology import Topology


@dataclass
class JudgedCell:
    """One launch of one cell with the gate's answer; stage 2 may replace `verdict`, once."""

    topology: Topology
    launch: int
    result: CellResult
    key: BaselineKey
    ref: CellRef
    baseline: CellBaseline | None
    verdict: CellVerdict
    stored: Launch | None
    """What a baseline would keep of it; None when nothing gated was measured."""
    accepted: bool
    """This run's update makes its numbers the new normal, so that its item passes whatever the verdict."""
    causes: tuple[str, ...] = ()
    """What the servers show beside the rows, a line each."""

    @property
    def id(self) -> str:
        """Name within the session: cells of several topologies are decided together."""
        return f"{self.topology.name} {self.result.cell} #{self.launch}"

    @property
    def notable(self) -> tuple[str, ...]:
        """One line for every metric that is not a plain PASS, worst first, then what else is known of the cause."""
        rows = sorted(self.verdict.rows, key=lambda row: -VERDICTS[row.verdict].rank)
        lines = tuple(row.line() for row in rows if row.verdict is not Verdict.PASS)
        if self.verdict.verdict is Verdict.NO_BASELINE and len(lines) > 1:
            lines = (f"{Verdict.NO_BASELINE}: {rows[0].note}",)
        return (*lines, *self.causes)


class Judging:
    """Holds cells against the baselines of this run and writes what was accepted, once, at the end."""

    def __init__(self, settings: Settings, inputs: Inputs, root: Path, run_id: str) -> None:
        self._settings = settings
        self._inputs = inputs
        self._run_id = run_id
        self._mode = Mode(settings["update_baselines"]) if settings["update_baselines"] else None
        self.store = BaselineStore(
            root / settings["baselines"], METRICS, trust_edits=self._mode is Mode.FIX, project=root
        )
        required = settings["require_baseline"] or ("yes" if os.environ.get("CI") else "no")
        self.require_baseline = required == "yes"
        self.cells: list[JudgedCell] = []
        dead = inputs.tolerances.dead_metrics(METRICS)
        if dead:
            raise UsageProblem(
                f"tolerances: no metric is called {dead[0]!r}; nearest: {nearest(dead[0], METRICS) or 'none'}"
            )
        if settings["baseline_reason"] and self._mode is None:
            raise UsageProblem("--baseline-reason does nothing without --update-baselines")

    def prepare(self, topologies: Sequence[Topology], hardware: Hardware) -> None:
        """Read the baselines of the selected topologies now. Raises BaselineProblem, a usage error, for a bad file."""
        for topology in topologies:
            self.store.load(self._key(topology, hardware))

    def judge(self, topology: Topology, result: CellResult, record: LaunchRecord, launch: int) -> JudgedCell:
        """Stage 1: hold a cell against its baseline."""
        now = datetime.now(UTC)
        key, ref = self._key(topology, record.hardware), self._ref(result)
        baseline = self.store.find(key, ref)
        verdict = judge(
            result,
            baseline,
            self.store.siblings(key, ref),
            self._inputs.tolerances,
            taken=now,
            inconclusive=(*result.inconclusive, *self._surroundings(baseline, record.environment)),
            absent="" if baseline else self.store.nearest(key, ref),
        )
        reason = self._settings["baseline_reason"] or ""
        cell = JudgedCell(
            topology=topology,
            launch=launch,
            result=result,
            key=key,
            ref=ref,
            baseline=baseline,
            verdict=verdict,
            stored=_launch(result, record, f"{self._run_id}-{launch}", self._run_id, now, reason),
            accepted=not result.inconclusive and self._accepted(verdict.verdict, baseline is not None),
        )
        self.cells.append(cell)
        return cell

    def recheck(self, cell: JudgedCell, environment: Mapping[str, str]) -> bool:
        """Look at a cell again when its launch has ended and `environment` says what the machine was like after it.

        Keeps that with the launch. True when the machine had changed, so that the cell's verdict is now inconclusive.
        """
        if cell.stored is not None:
            kept = {**cell.stored.environment, **environment}
            cell.stored = cell.stored.model_copy(update={"environment": kept})
        reasons = self._surroundings(cell.baseline, environment)
        verdict = set_aside(cell.verdict, reasons)
        if verdict.verdict is cell.verdict.verdict:
            return False
        cell.verdict, cell.accepted = verdict, False
        return True

    @staticmethod
    def _surroundings(baseline: CellBaseline | None, environment: Mapping[str, str]) -> tuple[str, ...]:
        if baseline is None:
            return ()
        return differences(environment, [launch.environment for launch in baseline.launches])

    def problem(self, cell: JudgedCell) -> str:
        """The failure message of a cell's item, empty when nothing blocks."""
        if cell.accepted or not blocks(cell.verdict.verdict, self.require_baseline):
            return ""
        return "\n".join([f"{cell.topology.name} {cell.result.cell}: {cell.verdict.verdict}", *cell.notable])

    def suspects(self, cell: JudgedCell) -> tuple[Suspect, ...]:
        """What stage 2 has to look at in a cell."""
        if cell.baseline is None or cell.accepted:
            return ()
        siblings = self.store.siblings(cell.key, cell.ref)
        return suspects_of(
            cell.result, cell.verdict, cell.baseline, siblings, self._inputs.tolerances, cell=cell.id
        )

    def append_history(self) -> None:
        """Remember every launch, whatever its verdict; those of a simulator are nobody's history. Raises OSError."""
        if not self._inputs.simulated:
            self.store.append_history([self._history(cell) for cell in self.cells])

    def update_baselines(self) -> list[str]:
        """Update baselines if asked, and say old -> new for each change. Raises OSError."""
        outcomes = [
            Outcome(cell.key, cell.ref, cell.verdict, cell.stored, cell.result.inconclusive)
            for cell in self.cells
            if cell.stored is not None
        ]
        if self._mode is None or not outcomes:
            return []
        known = [f"{self._inputs.workload.name}/{cell.id}" for cell in self._inputs.workload.cells]
        changes = self.store.update(
            outcomes,
            self._mode,
            self._settings["baseline_reason"] or "",
            datetime.now(UTC),
            known_cells=known,
        )
        return [line for change in changes for line in change.lines()]

    def _accepted(self, verdict: Verdict, has_baseline: bool) -> bool:
        """True when this run's update makes the cell's numbers the new normal, so that its item passes."""
        if self._mode is None or verdict in (Verdict.INVALID, Verdict.INCONCLUSIVE):
            return False
        if not has_baseline:
            return self._mode in (Mode.AUTO, Mode.CREATE)
        return bool(self._settings["baseline_reason"]) and self._mode in (Mode.AUTO, Mode.FIX)

    def _key(self, topology: Topology, hardware: Hardware) -> BaselineKey:
        args = {**topology.engine_args, **self._inputs.engine_args}
        spec = topology.model_dump(mode="json", exclude={"name"})
        engine = self._inputs.engines[topology.name]
        return BaselineKey(
            gpu=hardware.model,
            gpu_count=hardware.count,
            link=hardware.link,
            engine=engine.name,
            model=self._inputs.served_model,
            dtype=str(args.get("dtype", "auto")),
            topology=topology.name,
            topology_digest=digest_of(spec),
            definitions=DEFINITIONS,
            simulated=engine.simulated,
        )

    def _ref(self, result: CellResult) -> CellRef:
        cell = next(cell for cell in self._inputs.workload.cells if cell.id == result.cell)
        return CellRef(result.workload, result.cell, digest_of(cell.load))

    def _history(self, cell: JudgedCell) -> HistoryEntry:
        return HistoryEntry(
            key=cell.key,
            workload=cell.ref.workload,
            cell=cell.ref.cell,
            workload_digest=cell.ref.digest,
            verdict=cell.verdict.verdict,
            notes=tuple(row.note for row in cell.verdict.rows if row.note),
            session=self._run_id,
            launch=cell.stored,
            launch_id=f"{self._run_id}-{cell.launch}",
        )


def _launch(
    result: CellResult, record: LaunchRecord, launch_id: str, run_id: str, now: datetime, reason: str
) -> Launch | None:
    values: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, measured in result.metrics.items():
        spec = spec_of(name, METRICS)
        if spec is None or not spec.gated or measured.value is None:
            continue
        if measured.value > 0 and measured.n >= max(1, spec.min_n):
            values[name], counts[name] = measured.value, measured.n
    if not values:
        return None
    return Launch(
        id=launch_id,
        session=run_id,
        date=now,
        values=values,
        n=counts,
        engine_version=record.engine_version,
        driver=record.driver,
        host=hashlib.sha256(platform.node().encode()).hexdigest()[:12],
        reason=reason,
        environment=dict(record.environment),
    )
