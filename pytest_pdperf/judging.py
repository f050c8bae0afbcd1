"""Between a measured cell and the gate: which baseline it belongs to, what the item's outcome is, what is stored."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from .errors import UsageProblem
from .gate.adapter import judge
from .gate.baseline import Launch
from .gate.catalogue import spec_of
from .gate.fingerprint import BaselineKey, CellRef, digest_of
from .gate.history import HistoryEntry
from .gate.store import BaselineStore
from .gate.update import Mode, Outcome
from .gate.verdict import CellVerdict, Verdict, blocks
from .inputs import Inputs
from .measure.cell_result import CellResult
from .measure.table import DEFINITIONS, METRICS
from .options import Settings
from .spec.topology import Topology

QUIET = frozenset({Verdict.PASS})


@dataclass(frozen=True, slots=True)
class Hardware:
    """The part of a baseline's key that the machine decides."""

    model: str
    """GPU model, `cpu <model>`, or `simulated`."""
    count: int
    link: str
    """How GPUs reach each other: `NV18`, `PIX`, `loopback`."""


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """Where a launch's numbers come from: recorded with every baseline; only `hardware` is part of its key."""

    hardware: Hardware
    engine_version: str = "unknown"
    driver: str = "unknown"
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JudgedCell:
    """The gate's answer for one cell, ready to show."""

    verdict: Verdict
    notable: tuple[str, ...]
    """One line for every metric that is not a plain PASS, worst first."""


class Judging:
    """Holds cells against the baselines of this run and writes what was accepted, once, at the end."""

    def __init__(self, settings: Settings, inputs: Inputs, root: Path, run_id: str) -> None:
        self._settings = settings
        self._inputs = inputs
        self._run_id = run_id
        self._mode = Mode(settings["update_baselines"]) if settings["update_baselines"] else None
        self._store = BaselineStore(root / settings["baselines"], METRICS, trust_edits=self._mode is Mode.FIX)
        required = settings["require_baseline"] or ("yes" if os.environ.get("CI") else "no")
        self._require_baseline = required == "yes"
        self._outcomes: list[Outcome] = []
        self._history: list[HistoryEntry] = []
        if settings["baseline_reason"] and self._mode is None:
            raise UsageProblem("--baseline-reason does nothing without --update-baselines")

    def prepare(self, topologies: Sequence[Topology], hardware: Hardware) -> None:
        """Read the baselines of the selected topologies now. Raises BaselineProblem, a usage error, for a bad file."""
        for topology in topologies:
            self._store.load(self._key(topology, hardware))

    def judge(
        self, topology: Topology, result: CellResult, record: LaunchRecord, launch: int
    ) -> tuple[JudgedCell, str]:
        """The verdict of a cell, and the failure message of its item (empty when nothing blocks)."""
        now = datetime.now(UTC)
        key, ref = self._key(topology, record.hardware), self._ref(result)
        baseline = self._store.find(key, ref)
        verdict = judge(
            result,
            baseline,
            self._store.siblings(key, ref),
            self._inputs.tolerances,
            taken=now,
            absent="" if baseline else self._store.nearest(key, ref),
        )
        verdict = _final(verdict)
        self._remember(key, ref, verdict, result, record, launch, now)
        lines = [
            line for row, line in zip(_worst_first(verdict), verdict.lines(), strict=True) if row not in QUIET
        ]
        if verdict.verdict is Verdict.NO_BASELINE and len(set(lines)) > 1:
            lines = [f"NO_BASELINE: {verdict.rows[0].note}"]
        judged = JudgedCell(verdict.verdict, tuple(lines))
        if not blocks(verdict.verdict, self._require_baseline) or self._accepted(
            verdict.verdict, baseline is not None
        ):
            return judged, ""
        return judged, "\n".join([f"{topology.name} {result.cell}: {verdict.verdict}", *lines])

    def finish(self) -> list[str]:
        """Append history, update baselines if asked, and say old -> new for each change."""
        if not self._settings.simulated:
            self._store.append_history(self._history)
        if self._mode is None or not self._outcomes:
            return []
        known = [f"{self._inputs.workload.name}/{cell.id}" for cell in self._inputs.workload.cells]
        changes = self._store.update(
            self._outcomes,
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
        return CellRef(result.workload, result.cell, digest_of(cell.model_dump(mode="json")))

    def _remember(
        self,
        key: BaselineKey,
        ref: CellRef,
        verdict: CellVerdict,
        result: CellResult,
        record: LaunchRecord,
        launch: int,
        now: datetime,
    ) -> None:
        launch_id = f"{self._run_id}-{launch}"
        stored = _launch(result, record, launch_id, now, self._settings["baseline_reason"] or "")
        if stored is not None:
            self._outcomes.append(Outcome(key, ref, verdict, stored))
        self._history.append(
            HistoryEntry(
                key=key,
                workload=ref.workload,
                cell=ref.cell,
                workload_digest=ref.digest,
                verdict=verdict.verdict,
                notes=tuple(row.note for row in verdict.rows if row.note),
                session=self._run_id,
                launch=stored,
                launch_id=launch_id,
            )
        )


def _worst_first(verdict: CellVerdict) -> list[Verdict]:
    from .gate.verdict import VERDICTS

    return [row.verdict for row in sorted(verdict.rows, key=lambda row: -VERDICTS[row.verdict].rank)]


def _final(verdict: CellVerdict) -> CellVerdict:
    """Without a confirmation stage a suspect's first measurement is the last word, and says so."""
    if not verdict.suspects:
        return verdict
    rows = tuple(
        replace(row, verdict=Verdict.FAIL, note=f"{row.note}; not measured again")
        if row.verdict is Verdict.SUSPECT
        else row
        for row in verdict.rows
    )
    worst = Verdict.FAIL if verdict.verdict is Verdict.SUSPECT else verdict.verdict
    return CellVerdict(rows=rows, verdict=worst)


def _launch(
    result: CellResult, record: LaunchRecord, launch_id: str, now: datetime, reason: str
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
        date=now,
        values=values,
        n=counts,
        engine_version=record.engine_version,
        driver=record.driver,
        host=hashlib.sha256(platform.node().encode()).hexdigest()[:12],
        reason=reason,
        environment=dict(record.environment),
    )
