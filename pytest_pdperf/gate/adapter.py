"""The one place where the gate touches `measure` and `spec.tolerances`: measured cells in, verdicts out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from pytest_pdperf.measure.cell_result import CellResult
from pytest_pdperf.measure.table import METRICS
from pytest_pdperf.spec.tolerances import Tolerances

from .baseline import CellBaseline
from .catalogue import Catalogue, MetricSpec
from .confirm import Readings, Suspect, find_suspects
from .judge import Measurement, Sample, ToleranceLike, ToleranceOf, judge_cell
from .statistics import Pooled
from .verdict import CellVerdict


def measurement(
    result: CellResult,
    *,
    taken: datetime | None = None,
    inconclusive: tuple[str, ...] = (),
    absent: str = "",
    extra: tuple[str, ...] = (),
) -> Measurement:
    """What the judge needs of a `CellResult`."""
    return Measurement(
        metrics={name: Sample(value.value, value.n, value.note) for name, value in result.metrics.items()},
        requests=result.requests,
        ok=result.ok,
        invalid=tuple(result.invalid),
        inconclusive=inconclusive,
        taken=taken,
        absent=absent,
        extra=extra,
    )


def judge(
    result: CellResult,
    baseline: CellBaseline | None,
    siblings: Mapping[str, Pooled],
    tolerances: Tolerances,
    *,
    taken: datetime | None = None,
    inconclusive: tuple[str, ...] = (),
    absent: str = "",
    extra: tuple[str, ...] = (),
    catalogue: Catalogue = METRICS,
) -> CellVerdict:
    """Stage 1 for one measured cell; see `judge_cell`. `absent` says why `baseline` is None (nearest keys,
    what differs).
    """

    measured = measurement(result, taken=taken, inconclusive=inconclusive, absent=absent, extra=extra)
    return judge_cell(measured, baseline, siblings, _tolerances(result, tolerances), catalogue)


def suspects_of(
    result: CellResult,
    verdict: CellVerdict,
    baseline: CellBaseline,
    siblings: Mapping[str, Pooled],
    tolerances: Tolerances,
    *,
    cell: str,
    catalogue: Catalogue = METRICS,
) -> tuple[Suspect, ...]:
    """What stage 2 has to look at in one judged cell; `cell` is the id to use in plans and readings."""

    return find_suspects(cell, verdict, baseline, siblings, _tolerances(result, tolerances), catalogue)


def readings_of(
    suspects: Iterable[Suspect], launches: Sequence[tuple[str, Mapping[str, CellResult]]]
) -> dict[tuple[str, str], Readings]:
    """What the fresh launches say of each suspect: `launches` is (`A` reference or `B` candidate, cell id
    -> result).

    A result that is invalid, had a failed request or lacks the metric gives no reading, so that `decide`
    sees a hole.
    """
    found = {}
    for suspect in suspects:
        arms: dict[str, list[float]] = {"A": [], "B": []}
        for arm, results in launches:
            result = results.get(suspect.cell)
            if result is None or result.invalid or not 0 < result.ok == result.requests:
                continue
            measured = result.metrics.get(suspect.metric)
            if measured is not None and measured.value is not None:
                arms[arm].append(measured.value)
        found[suspect.cell, suspect.metric] = Readings(tuple(arms["B"]), tuple(arms["A"]))
    return found


def _tolerances(result: CellResult, tolerances: Tolerances) -> ToleranceOf:
    def tolerance_of(metric: str, spec: MetricSpec) -> ToleranceLike:
        place = (metric, result.workload, result.cell, result.topology)
        return tolerances.for_(*place, spec.tau or 0.0, spec.floor)

    return tolerance_of
