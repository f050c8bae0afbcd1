"""Tolerance overrides: which one wins, and that a misspelt one is found."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.loader import load_tolerances, shipped_fixtures
from pytest_pdperf.spec.tolerances import Override, Tolerance, Tolerances

CELL = ("ttft_ms.p50", "quick", "in128-out64-c1", "pd-1p2d-tp2-tcp")


def test_the_shipped_file_loosens_the_quick_workload_only_and_never_its_tpot() -> None:
    shipped = load_tolerances(shipped_fixtures() / "tolerances.yaml")
    for metric in ("ttft_ms_p50", "itl_ms_p99", "e2e_ms_p50", "output_tps", "tpot_ms_p50"):
        assert shipped.for_(metric, "fixed-shapes", "in512-out256-c16", "pd-1p2d", 0.1, 1.0) == Tolerance(
            0.1, 1.0
        )
    assert shipped.for_("tpot_ms_p50", "quick", "in128-out64-c1", "pd-1p2d", 0.05, 0.2) == Tolerance(
        0.05, 0.2
    )
    assert shipped.for_("ttft_ms_p50", "quick", "in128-out64-c1", "pd-1p2d", 0.1, 1.0).floor > 1.0


def test_most_specific_wins_whatever_the_order() -> None:
    overrides = (
        Override(metric="ttft*", tau=0.2),
        Override(metric="ttft*", topology="*-tcp", tau=0.3),
        Override(metric="ttft_ms.p50", topology="*-tcp", tau=0.4),
        Override(tau=0.9, floor=5),
        Override(metric="tpot*", topology="*-tcp", cell="*", tau=0.8),
    )
    for order in itertools.permutations(overrides):
        assert Tolerances(overrides=order).for_(*CELL, 0.1, 1.0) == Tolerance(0.4, 5)


def test_later_wins_among_equals_and_tau_and_floor_are_separate() -> None:
    tolerances = Tolerances(
        overrides=(
            Override(metric="ttft*", tau=0.2, floor=3),
            Override(workload="qui*", tau=0.3),
        )
    )
    assert tolerances.for_(*CELL, 0.1, 1.0) == Tolerance(0.3, 3)


@pytest.mark.parametrize("selector", ["metric", "workload", "cell", "topology"])
def test_every_selector_selects(selector: str) -> None:
    names = dict(zip(("metric", "workload", "cell", "topology"), CELL, strict=True))
    hit = Override.model_validate({selector: names[selector], "tau": 0.5})
    miss = Override.model_validate({selector: "other", "tau": 0.5})
    assert Tolerances(overrides=(hit,)).for_(*CELL, 0.1, 1.0).tau == 0.5
    assert Tolerances(overrides=(miss,)).for_(*CELL, 0.1, 1.0).tau == 0.1


def test_floor_zero_is_an_override() -> None:
    assert Tolerances(overrides=(Override(floor=0),)).for_(*CELL, 0.1, 1.0) == Tolerance(0.1, 0)


def test_misspelt_metrics_are_found() -> None:
    tolerances = Tolerances(
        overrides=(
            Override(metric="ttft*", tau=0.1),
            Override(metric="tfft_ms.p50", tau=0.1),
            Override(tau=0.1),
        )
    )
    assert tolerances.dead_metrics(["ttft_ms.p50", "tpot_ms.p50"]) == ("tfft_ms.p50",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("overrides:\n  - {metric: x}", "t.yaml:2: overrides.0: an override needs tau (relative), floor"),
        (
            "overrides:\n  - {metrc: x, tau: 0.1}",
            "t.yaml:2: overrides.0.metrc: unknown key; did you mean 'metric'?",
        ),
        ("overrides:\n  - {tau: 0}", "overrides.0.tau: must be more than 0, got 0"),
        ("overrides:\n  - {tau: 5}", "overrides.0.tau: must be at most 2, got 5"),
        ("overrides:\n  - {floor: -1}", "overrides.0.floor: must be at least 0, got -1"),
        ("overrides:\n  - {tau: '5 %'}", "overrides.0.tau: must be a number, got '5 %'"),
        ("overrides:\n  - {tau: .nan}", "overrides.0.tau: '.nan' is not a finite number"),
        ("override: []", "t.yaml:1: override: unknown key; did you mean 'overrides'?"),
        ("overrides:\n  a: 1", "t.yaml:1: overrides: must be a list"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(UsageProblem) as caught:
        load_tolerances(path)
    assert message in str(caught.value)


patterns = st.sampled_from(["*", "ttft*", "ttft_ms.p50", "other", "*p50"])


@given(st.lists(st.builds(Override, metric=patterns, tau=st.floats(0.01, 1)), max_size=6))
def test_the_answer_comes_from_a_matching_override_or_the_default(overrides: list[Override]) -> None:
    found = Tolerances(overrides=tuple(overrides)).for_(*CELL, 0.05, 1.0).tau
    matching = [o for o in overrides if o.metric in ("*", "ttft*", "ttft_ms.p50", "*p50")]
    assert found in [o.tau for o in matching] or (not matching and found == 0.05)
