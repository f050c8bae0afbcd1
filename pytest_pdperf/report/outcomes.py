"""What a finished run left on disk: one file a cell, so that any process, also a later one, can show it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from pytest_pdperf.evidence.naming import Naming
from pytest_pdperf.evidence.ttft_split import TtftSplit
from pytest_pdperf.gate.verdict import Verdict, VerdictRow, blocks
from pytest_pdperf.measure.cell_result import CellResult
from pytest_pdperf.writing import whole

from .kv_path import kin_together, read_kv_path

SCHEMA = 1
ACCEPTED = "accepted"
"""In the details of a cell whose numbers `--update-baselines` made the new normal."""
UNSETTLED = frozenset({"", "INVALID", "INCONCLUSIVE", "SUSPECT"})
"""Verdicts that say nothing of the cell's speed, so that a resumed run measures it again."""


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """One measured and judged cell."""

    nodeid: str
    order: int
    """Position within the run; tables keep it."""
    topology: str
    kind: str
    engine: str
    launch: int
    result: CellResult
    verdict: str = ""
    """Verdict of the cell, empty until the gate has spoken."""
    rows: tuple[str, ...] = ()
    """Verdict rows that need attention, ready to print."""
    evidence: str = "unknown"
    evidence_reasons: tuple[str, ...] = ()
    judged: tuple[VerdictRow, ...] = ()
    """Every metric that the gate held against the baseline, as data; empty in files that do not have it."""
    ttft_split: TtftSplit | None = None
    """Stages of the mean TTFT, where the engines' histograms gave them."""
    naming: Naming | None = None
    """Which fault is behind what was seen; None in files that do not have it, which is not "none was found"."""
    details: dict[str, Any] = field(default_factory=dict)
    """The rest of the server side as plain data (`evidence.cell_evidence`), and `mixed` for mixed workloads."""

    @property
    def open(self) -> bool:
        """Whether fresh launches have yet to decide it; what an update has accepted needs none."""
        return self.verdict == "SUSPECT" and not self.details.get(ACCEPTED)

    def red(self, require_baseline: bool) -> bool:
        """Whether it fails its run; a cell whose numbers an update made the new normal does not."""
        if self.details.get(ACCEPTED) or self.verdict not in set(Verdict):
            return False
        return blocks(Verdict(self.verdict), require_baseline)

    def details_when(self, accepted: bool) -> dict[str, Any]:
        """Its details, which say whether its numbers are the new normal."""
        others = {key: value for key, value in self.details.items() if key != ACCEPTED}
        return others | ({ACCEPTED: True} if accepted else {})

    def to_json(self) -> dict[str, Any]:
        """Plain data for the cell's file."""
        return {
            "schema": SCHEMA,
            "nodeid": self.nodeid,
            "order": self.order,
            "topology": self.topology,
            "kind": self.kind,
            "engine": self.engine,
            "launch": self.launch,
            "verdict": self.verdict,
            "rows": list(self.rows),
            "evidence": self.evidence,
            "evidence_reasons": list(self.evidence_reasons),
            "judged": [asdict(row) for row in self.judged],
            "ttft_split": self.ttft_split.to_json() if self.ttft_split else None,
            "naming": self.naming.to_json() if self.naming else None,
            "details": self.details,
            "result": self.result.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CellOutcome:
        """Inverse of `to_json`. Raises KeyError or ValueError for what is not such data."""
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}, this version reads {SCHEMA}")
        return cls(
            nodeid=data["nodeid"],
            order=data["order"],
            topology=data["topology"],
            kind=data["kind"],
            engine=data["engine"],
            launch=data["launch"],
            verdict=data["verdict"],
            rows=tuple(data["rows"]),
            evidence=data["evidence"],
            evidence_reasons=tuple(data["evidence_reasons"]),
            judged=tuple(_row(row) for row in data.get("judged", ())),
            ttft_split=TtftSplit.from_json(data["ttft_split"]) if data.get("ttft_split") else None,
            naming=Naming.from_json(data["naming"]) if data.get("naming") else None,
            details=dict(data.get("details") or {}),
            result=CellResult.from_json(data["result"]),
        )


def _row(data: dict[str, Any]) -> VerdictRow:
    return VerdictRow(**{**data, "verdict": Verdict(data["verdict"])})


def file_of(outcome: CellOutcome) -> tuple[str, bytes]:
    """Name and content of one cell's file."""
    launch = "" if outcome.launch == 1 else f".launch{outcome.launch}"
    page = orjson.dumps(outcome.to_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
    return f"{outcome.topology}--{outcome.result.cell}{launch}.json", page


def save(outcome: CellOutcome, folder: Path) -> Path:
    """Write one cell's file in a way that a crash leaves the old or the new one, never half of it. Raises OSError."""
    name, page = file_of(outcome)
    folder.mkdir(parents=True, exist_ok=True)
    with whole(folder / name) as part:
        part.write_bytes(page)
    return folder / name


def load(folder: Path, unwritten: Mapping[Path, bytes] | None = None) -> tuple[list[CellOutcome], list[str]]:
    """All cells of a run in their order, and one line for each file that could not be read.

    `unwritten` are files of this and other folders that are newer than those on disk.
    """
    newer = {path: page for path, page in (unwritten or {}).items() if path.parent == folder}
    outcomes: list[CellOutcome] = []
    problems: list[str] = []
    for path in sorted({*folder.glob("*.json"), *newer}):
        try:
            page = newer[path] if path in newer else path.read_bytes()
            outcomes.append(CellOutcome.from_json(orjson.loads(page)))
        except (KeyError, TypeError, ValueError) as problem:
            problems.append(f"{path.name}: not readable: {problem}")
    return sorted(outcomes, key=lambda o: (o.order, o.nodeid)), problems


@dataclass(frozen=True, slots=True)
class RunSummary:
    """All that the terminal shows at the end of a run."""

    run_id: str
    engine: str
    simulated: bool
    folder: Path
    outcomes: tuple[CellOutcome, ...]
    launches: tuple[str, ...] = ()
    """One line a bring-up: topology and how long its stages took."""
    changes: tuple[str, ...] = ()
    """One line a baseline entry that this run wrote."""
    problems: tuple[str, ...] = ()
    rerun: str = ""
    """Command that runs this selection again, without the cell."""

    def counts(self) -> dict[str, int]:
        """Cells per verdict, in order of first appearance."""
        counts: dict[str, int] = {}
        for outcome in self.outcomes:
            counts[outcome.verdict or "NOT_JUDGED"] = counts.get(outcome.verdict or "NOT_JUDGED", 0) + 1
        return counts


def cells_of(outcomes: Iterable[CellOutcome]) -> dict[str, list[CellOutcome]]:
    """Outcomes grouped by cell, so that topologies stand beside each other, and TCP beside RDMA."""
    grouped: dict[str, list[CellOutcome]] = {}
    for outcome in outcomes:
        grouped.setdefault(outcome.result.cell, []).append(outcome)
    return {cell: kin_together(group, lambda o: read_kv_path(o.details)) for cell, group in grouped.items()}


def settled(outcomes: Iterable[CellOutcome]) -> list[CellOutcome]:
    """Cells of a broken-off run that need no second look: also those that failed, or a run could be resumed green."""
    return [outcome for outcome in outcomes if outcome.verdict not in UNSETTLED]
