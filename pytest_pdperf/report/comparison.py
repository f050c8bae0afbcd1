"""Two topologies of one run side by side: ratios over their launches, held against what the suite expects of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_pdperf.gate.catalogue import spec_of
from pytest_pdperf.gate.paired import Answer, Expectation, Ratio, check, compare
from pytest_pdperf.measure.table import METRICS

from .outcomes import CellOutcome

FEWEST = "fewer samples than the metric needs"


def answers(expectation: Expectation, outcomes: Iterable[CellOutcome]) -> list[Answer]:
    """The claim held against every cell that it is about, in order of measuring; at least one answer.

    A cell that one side did not measure, or not validly, is undecided and says why.
    """
    sides = (expectation.candidate, expectation.reference)
    rows = [
        o for o in outcomes if o.topology in sides and expectation.applies(o.result.workload, o.result.cell)
    ]
    places = list(dict.fromkeys((o.result.workload, o.result.cell) for o in rows))
    if not places:
        return [check(expectation, None, f"no such cell was measured on {sides[0]} or {sides[1]}")]
    found = []
    for workload, cell in places:
        here = [o for o in rows if (o.result.workload, o.result.cell) == (workload, cell)]
        ratio = ratio_of(here, *sides, expectation.metric)
        exact = expectation.model_copy(update={"cell": cell, "workload": workload})
        found.append(check(exact, ratio) if isinstance(ratio, Ratio) else check(exact, None, ratio))
    return found


def ratio_of(outcomes: Sequence[CellOutcome], candidate: str, reference: str, metric: str) -> Ratio | str:
    """Ratio of one metric in one cell, or why there is none. One value a launch; invalid launches do not count."""
    values: list[list[float]] = []
    for topology in (candidate, reference):
        launches = [o for o in outcomes if o.topology == topology]
        found = [_value(o, metric) for o in launches]
        good = [value for value in found if isinstance(value, float)]
        if not good:
            reasons = dict.fromkeys(value for value in found if isinstance(value, str))
            return f"{topology}: {'; '.join(reasons) or 'not measured in this run'}"
        values.append(good)
    spec = spec_of(metric, METRICS)
    assert spec is not None, metric
    return compare(values[0], values[1], spec.prior_sd)


def _value(outcome: CellOutcome, metric: str) -> float | str:
    result = outcome.result
    if result.invalid:
        return f"INVALID ({result.invalid[0]})"
    if not 0 < result.ok == result.requests:
        return f"{result.requests - result.ok} of {result.requests} requests failed"
    measured, spec = result.metrics.get(metric), spec_of(metric, METRICS)
    if measured is None or measured.value is None:
        note = f" ({measured.note})" if measured is not None and measured.note else ""
        return f"{metric} is not known{note}"
    if measured.value <= 0:
        return f"{metric} is {measured.value:g}, which has no ratio"
    if spec is not None and measured.n < spec.min_n:
        return f"{FEWEST}: n={measured.n} < {spec.min_n}"
    return float(measured.value)


def comparison_lines(outcomes: Sequence[CellOutcome], candidate: str, reference: str) -> list[str]:
    """Every gated metric of every shared cell as candidate / reference with its interval, ready to print."""
    places = dict.fromkeys((o.result.workload, o.result.cell) for o in outcomes)
    lines = [f"{candidate} / {reference}: ratio (95 % interval, launches)"]
    for workload, cell in places:
        here = [o for o in outcomes if (o.result.workload, o.result.cell) == (workload, cell)]
        names = dict.fromkeys(name for o in here for name in o.result.metrics)
        rows = []
        for name in names:
            spec = spec_of(name, METRICS)
            if spec is None or not spec.gated:
                continue
            ratio = ratio_of(here, candidate, reference, name)
            rows.append(f"  {name:<24} {ratio.text() if isinstance(ratio, Ratio) else ratio}")
        lines += [f"{workload}/{cell}", *rows]
    return lines
