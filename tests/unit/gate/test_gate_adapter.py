"""The gate on the real metric table and the real result type."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from pytest_pdperf.gate.adapter import judge, readings_of, suspects_of
from pytest_pdperf.gate.catalogue import spec_of
from pytest_pdperf.gate.confirm import Design, Readings, decide
from pytest_pdperf.gate.verdict import Verdict
from pytest_pdperf.measure.cell_result import CellResult, MetricValue
from pytest_pdperf.measure.table import METRICS
from pytest_pdperf.spec.tolerances import Override, Tolerances
from tests.unit.gate.gate_tables import baseline

GATED = {name: 100.0 for name, metric in METRICS.items() if metric.gated}
STORED = baseline({name: [value] * 5 for name, value in GATED.items()})


def result(**changes: float | None) -> CellResult:
    values = {**GATED, **changes}
    metrics = {name: MetricValue(value, 400 if value is not None else 0) for name, value in values.items()}
    return CellResult("pd-1p2d", "fixed-shapes", "in512-out256-c16", metrics, requests=64, ok=64)


def test_every_gated_metric_is_judged_and_has_what_the_gate_needs() -> None:
    verdict = judge(result(), STORED, {}, Tolerances())
    assert verdict.verdict is Verdict.PASS
    assert {row.metric for row in verdict.rows} == set(GATED)
    for name in GATED:
        spec = spec_of(name, METRICS)
        assert spec is not None and spec.tau and spec.prior_sd > 0 and spec.direction in (1, -1)


def test_every_gated_metric_alone_turns_the_cell_suspect() -> None:
    for name in GATED:
        direction = METRICS[name].direction
        verdict = judge(result(**{name: 100.0 * 1.5**direction}), STORED, {}, Tolerances())
        assert verdict.verdict is Verdict.SUSPECT, name
        assert [row.metric for row in verdict.suspects] == [name]


def test_overrides_decide_the_limit() -> None:
    loose = Tolerances(overrides=(Override(metric="output_tps", cell="in512-*", tau=0.6),))
    slow = result(output_tps=70.0)
    assert judge(slow, STORED, {}, Tolerances()).verdict is Verdict.SUSPECT
    assert judge(slow, STORED, {}, loose).verdict is Verdict.PASS
    verdict = judge(slow, STORED, {}, Tolerances())
    (suspect,) = suspects_of(slow, verdict, STORED, {}, Tolerances(), cell="a/b")
    assert (suspect.cell, suspect.metric, suspect.direction) == ("a/b", "output_tps", -1)


def test_a_metric_that_vanished_is_invalid() -> None:
    assert judge(result(tpot_ms_p50=None), STORED, {}, Tolerances()).verdict is Verdict.INVALID


def test_readings_keep_the_arms_apart_and_leave_holes_where_a_launch_is_bad() -> None:
    slow = result(output_tps=70.0)
    verdict = judge(slow, STORED, {}, Tolerances())
    suspects = suspects_of(slow, verdict, STORED, {}, Tolerances(), cell="w/c")
    good = [("A", {"w/c": result()}), ("B", {"w/c": slow}), ("B", {"w/c": slow}), ("A", {"w/c": result()})]
    assert readings_of(suspects, good) == {("w/c", "output_tps"): Readings((70.0, 70.0), (100.0, 100.0))}
    failed = replace(slow, ok=63)
    bad = [good[0], ("B", {"w/c": failed}), ("B", {"w/c": replace(slow, invalid=("role died",))}), ("A", {})]
    assert readings_of(suspects, bad) == {("w/c", "output_tps"): Readings((), (100.0,))}
    (confirmation,) = decide(Design.PAIRED, suspects, readings_of(suspects, bad))
    assert not confirmation.complete


def test_judging_does_not_load_the_slow_half_of_scipy() -> None:
    code = (
        "import sys; from pytest_pdperf.gate.statistics import t_quantile; t_quantile(.95, 12); "
        "import pytest_pdperf.gate.adapter; assert 'scipy.special' in sys.modules; "
        "bad = [m for m in ('scipy.stats', 'pandas', 'ruptures') if m in sys.modules]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
