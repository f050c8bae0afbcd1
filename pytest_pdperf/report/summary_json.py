"""The run for machines: counts per verdict, what the exit status means, every cell with its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson

from pytest_pdperf import __version__
from pytest_pdperf.evidence.naming import Naming
from pytest_pdperf.gate.verdict import VERDICTS, Verdict, VerdictRow
from pytest_pdperf.measure.cell_result import MetricValue
from pytest_pdperf.measure.table import METRICS
from pytest_pdperf.writing import whole

from .outcomes import CellOutcome
from .source import Run
from .sweep import peaks_of, standings_of

SCHEMA = 1
SCHEMA_FILE = "summary-1.json"

EXIT_MEANINGS: Mapping[int, str] = {
    0: "nothing blocks: every cell passed, or its verdict is only reported",
    1: "at least one test item failed: a blocking verdict, or a test of its own",
    2: "the run was interrupted; cells that were finished are in this file",
    3: "pytest had an internal error; cells that were finished are in this file",
    4: "pytest was used wrongly: nothing was measured",
    5: "no test item was selected",
}
"""pytest's exit statuses, as this suite uses them."""


def summary_of(run: Run, *, require_baseline: bool = False, exit_status: int | None = None) -> dict[str, Any]:
    """Plain data that `docs/schema/summary-1.json` describes. Without `exit_status` it is what the verdicts ask for."""
    counts = {verdict.value: 0 for verdict in Verdict} | {"NOT_JUDGED": 0}
    blocking = 0
    for outcome in run.outcomes:
        name = outcome.verdict if outcome.verdict in counts else "NOT_JUDGED"
        counts[name] += 1
        blocking += outcome.red(require_baseline)
    status = exit_status if exit_status is not None else int(blocking > 0)
    return {
        "schema": SCHEMA,
        "tool": {"name": "pytest-pdperf", "version": __version__},
        "run_id": run.name,
        "simulated": run.simulated,
        "counts": counts,
        "cells_total": len(run.outcomes),
        "exit": {
            "status": status,
            "meaning": EXIT_MEANINGS.get(status, "not one of pytest's own exit statuses"),
            "blocking_cells": blocking,
            "require_baseline": require_baseline,
        },
        "verdicts": {verdict.value: row.meaning for verdict, row in VERDICTS.items()},
        "cells": [_cell(outcome, require_baseline) for outcome in run.outcomes],
        "missing": [
            {"topology": h.topology, "launch": h.launch, "cell": h.cell, "reason": h.reason}
            for h in run.holes
        ],
        "sweep": {
            "peaks": [asdict(peak) for peak in peaks_of(run.outcomes)],
            "standings": [asdict(standing) for standing in standings_of(run.outcomes)],
        },
        "baseline_changes": list(run.changes),
        "warnings": list(run.problems),
    }


def write_summary_json(summary: Mapping[str, Any], path: Path) -> Path:
    """Store the summary as strict JSON, whole or not at all. Raises OSError."""
    with whole(path) as part:
        part.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n")
    return path


def json_schema() -> dict[str, Any]:
    """The published schema of the summary, as it ships inside the package."""
    text = files("pytest_pdperf.report").joinpath("schema", SCHEMA_FILE).read_bytes()
    schema: dict[str, Any] = orjson.loads(text)
    return schema


def _cell(outcome: CellOutcome, require_baseline: bool) -> dict[str, Any]:
    result = outcome.result
    judged = {row.metric: row for row in outcome.judged}
    known = outcome.verdict in set(Verdict)
    return {
        "nodeid": outcome.nodeid,
        "topology": outcome.topology,
        "kind": outcome.kind,
        "engine": outcome.engine,
        "launch": outcome.launch,
        "workload": result.workload,
        "cell": result.cell,
        "verdict": outcome.verdict if known else "NOT_JUDGED",
        "blocks": outcome.red(require_baseline),
        "evidence": outcome.evidence,
        "requests": result.requests,
        "ok": result.ok,
        "invalid": list(result.invalid),
        "rows": list(outcome.rows),
        "naming": _naming(outcome.naming),
        "definitions": result.definitions,
        "metrics": {name: _metric(name, value, judged.get(name)) for name, value in result.metrics.items()},
    }


def _naming(naming: Naming | None) -> dict[str, Any] | None:
    if naming is None:
        return None
    return {
        "findings": [
            {"fault": one.fault.value, "where": one.where, "line": one.line} for one in naming.findings
        ],
        "unknown": list(naming.unknown),
    }


def _metric(name: str, value: MetricValue, row: VerdictRow | None) -> dict[str, Any]:
    """One number; the gate's part only where the gate compared it."""
    spec = METRICS.get(name.rpartition(".")[2])
    found: dict[str, Any] = {
        "value": _finite(value.value),
        "unit": spec.unit if spec else "",
        "n": value.n,
        "better": ("lower" if spec.direction > 0 else "higher") if spec else None,
    }
    if value.note:
        found["note"] = value.note
    if row is not None:
        found["gate"] = {
            "verdict": row.verdict.value,
            "baseline": _finite(row.baseline),
            "change": _finite(row.change),
            "limit": _finite(row.limit),
            "launches": row.launches,
            "provisional": row.provisional,
        }
    return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
