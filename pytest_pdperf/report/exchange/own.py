"""Our own raw files as imported results, so that `pdperf import` shows a file that came without its run folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from pytest_pdperf.measure.records import RequestRecord
from pytest_pdperf.measure.samples import e2e_ms, streamed, successes, tpot_ms, ttft_ms
from pytest_pdperf.measure.table import DEFINITIONS, METRICS

from .imported import ImportedMetric, ImportedResult
from .raw import FORMAT, VERSION, RawCell, read_raw

TOOL = "pdperf"
_CLIENTS = re.compile(r"-c(\d+)\Z")
_SAMPLES: tuple[tuple[str, Callable[[RequestRecord], float | None]], ...] = (
    ("ttft_ms", ttft_ms),
    ("tpot_ms", tpot_ms),
    ("e2e_ms", e2e_ms),
)


def read(path: Path) -> tuple[ImportedResult, ...]:
    """A result a cell. Numbers of other definitions than this version's keep their own names.

    Raises UsageProblem for what `read_raw` refuses.
    """
    return tuple(_result(path, cell) for cell in read_raw(path))


def _result(path: Path, cell: RawCell) -> ImportedResult:
    result = cell.outcome.result
    good = streamed(successes(cell.records.requests))
    planned = {(r.planned_input_tokens, r.planned_output_tokens) for r in cell.records.requests}
    one = planned.pop() if len(planned) == 1 else (None, None)
    clients = _CLIENTS.search(cell.cell)
    same = result.definitions == DEFINITIONS
    return ImportedResult(
        source=f"{path}: {cell.topology}/{cell.cell}" + (f" launch {cell.launch}" if cell.launch > 1 else ""),
        tool=TOOL,
        version=result.definitions,
        layout=f"{FORMAT} {VERSION}",
        metrics={
            (name if same else f"{TOOL}:{name}"): ImportedMetric(
                value.value,
                METRICS[name].unit,
                METRICS[name].definition if same else f"of {result.definitions}, not of {DEFINITIONS}",
                value.n,
                value.note,
            )
            for name, value in result.metrics.items()
            if name in METRICS
        },
        backend=cell.outcome.engine,
        input_tokens=one[0],
        output_tokens=one[1],
        lengths="exact" if one[0] is not None else "unknown",
        concurrency=int(clients[1]) if clients else None,
        requests=result.requests,
        ok=result.ok,
        failed=result.requests - result.ok,
        warmup_rows=sum(r.warmup for r in cell.records.requests),
        duration_s=result.wall_s,
        samples={stem: _known(of(r) for r in good) for stem, of in _SAMPLES},
        warnings=(*(f"INVALID: {reason}" for reason in result.invalid), *result.warnings),
    )


def _known(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(value for value in values if value is not None)
