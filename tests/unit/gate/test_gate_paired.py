"""Two topologies side by side: the interval, the grammar of claims and what three standings mean."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.gate.paired import (
    Bounds,
    Expectation,
    Ratio,
    Standing,
    check,
    compare,
    load_expectations,
    parse_bounds,
)
from pytest_pdperf.gate.statistics import t_quantile
from tests.unit.gate.gate_tables import CATALOGUE


def test_one_launch_each_leans_on_the_prior() -> None:
    found = compare([20.0], [100.0], 0.04)
    reach = t_quantile(0.975, 8) * 0.04 * math.sqrt(2)
    assert found.value == pytest.approx(0.2)
    assert (found.low, found.high) == pytest.approx((0.2 * math.exp(-reach), 0.2 * math.exp(reach)))
    assert "1+1 launches, unpaired" in found.text()


def test_paired_by_hand() -> None:
    found = compare([10.0, 12.0], [20.0, 22.0], 0.05, paired=True)
    differences = [math.log(0.5), math.log(12 / 22)]
    spread = (differences[0] - differences[1]) ** 2 / 2
    variance = (8 * 2 * 0.05**2 + spread) / 9
    assert math.log(found.value) == pytest.approx(sum(differences) / 2)
    assert math.log(found.high / found.value) == pytest.approx(t_quantile(0.975, 9) * math.sqrt(variance / 2))


def test_unpaired_by_hand() -> None:
    ours, theirs = (10.0, 11.0, 12.0), (100.0, 103.0, 108.0, 110.0)
    found = compare(ours, theirs, 0.05)
    squares = 0.0
    for values in (ours, theirs):
        mean = sum(math.log(v) for v in values) / len(values)
        squares += sum((math.log(v) - mean) ** 2 for v in values)
    variance = (8 * 0.05**2 + squares) / (8 + 5)
    reach = t_quantile(0.975, 8 + 5) * math.sqrt(variance * (1 / 3 + 1 / 4))
    assert math.log(found.high / found.value) == pytest.approx(reach)


def test_pairs_cancel_what_both_share() -> None:
    nights = [1.0, 1.3, 0.8, 1.15, 0.9, 1.2]
    ours, theirs = [5.0 * n for n in nights], [10.0 * n for n in nights]
    paired = compare(ours, theirs, 0.02, paired=True)
    unpaired = compare(ours, theirs, 0.02)
    assert paired.value == pytest.approx(0.5) and unpaired.value == pytest.approx(0.5)
    assert paired.high / paired.low < 1.05 < unpaired.high / unpaired.low
    assert "paired by session" in paired.text()


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    source = random.Random(5)
    covered, rounds = 0, 2000
    for _ in range(rounds):
        ours = [0.5 * math.exp(source.gauss(0, 0.03)) for _ in range(3)]
        theirs = [math.exp(source.gauss(0, 0.03)) for _ in range(4)]
        found = compare(ours, theirs, 0.03)
        covered += found.low <= 0.5 <= found.high
    assert covered / rounds == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize(
    ("ours", "theirs", "paired"),
    [
        ([], [1.0], False),
        ([1.0], [], False),
        ([1.0, 2.0], [1.0], True),
        ([0.0], [1.0], False),
        ([math.nan], [1.0], False),
    ],
)
def test_what_has_no_ratio(ours: list[float], theirs: list[float], paired: bool) -> None:
    with pytest.raises(ValueError):
        compare(ours, theirs, 0.03, paired=paired)


@given(st.floats(0.01, 100), st.floats(0.001, 0.3))
def test_swapping_the_arms_inverts_the_interval(ratio: float, sd: float) -> None:
    one, other = compare([ratio], [1.0], sd), compare([1.0], [ratio], sd)
    assert one.low == pytest.approx(1 / other.high)
    assert one.low < one.value < one.high


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("at least 5x lower", Bounds(0.0, 0.2)),
        ("at least 2.5x higher", Bounds(2.5, math.inf)),
        ("at most 1.3x higher", Bounds(0.0, 1.3)),
        ("at most 2x  lower", Bounds(0.5, math.inf)),
        ("within 10 %", Bounds(1 / 1.1, 1.1)),
        ("within 10%", Bounds(1 / 1.1, 1.1)),
        ("lower", Bounds(0.0, 1.0)),
        ("higher", Bounds(1.0, math.inf)),
    ],
)
def test_claims_become_bounds(text: str, bounds: Bounds) -> None:
    assert parse_bounds(text) == bounds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5x lower",
        "at least 0.2x lower",
        "at least 1x higher",
        "within 0 %",
        "at least -5x lower",
        "faster",
    ],
)
def test_what_is_no_claim(text: str) -> None:
    with pytest.raises(ValueError, match="is no expectation"):
        parse_bounds(text)


CLAIM = Expectation(
    candidate="pd-1p2d",
    reference="aggregated-3x",
    cell="in4096-*",
    metric="itl_ms_p99",
    expect="at least 5x lower",
)


@pytest.mark.parametrize(
    ("low", "value", "high", "standing"),
    [
        (0.03, 0.05, 0.08, Standing.HOLDS),
        (0.15, 0.18, 0.22, Standing.UNDECIDED),
        (0.18, 0.21, 0.25, Standing.UNDECIDED),
        (0.21, 0.30, 0.40, Standing.VIOLATED),
        (2.0, 3.0, 4.0, Standing.VIOLATED),
    ],
)
def test_only_a_whole_interval_decides(low: float, value: float, high: float, standing: Standing) -> None:
    answer = check(CLAIM, Ratio(value, low, high, (3, 3), False))
    assert answer.standing is standing
    assert "itl_ms_p99 of pd-1p2d at least 5x lower than aggregated-3x at in4096-*" in answer.line()


def test_unmeasured_is_undecided() -> None:
    answer = check(CLAIM, None)
    assert answer.standing is Standing.UNDECIDED and "not measured on both" in answer.line()


def test_a_claim_is_about_its_cells() -> None:
    assert CLAIM.applies("fixed-shapes", "in4096-out128-c16")
    assert not CLAIM.applies("fixed-shapes", "in512-out256-c16")


GOOD = """
expectations:
  - candidate: pd-1p2d
    reference: aggregated-3x
    metric: ttft_ms_p50
    expect: at most 3x higher
    reason: the published table
"""


def test_a_file_of_claims(tmp_path: Path) -> None:
    path = tmp_path / "expectations.yaml"
    path.write_text(GOOD)
    (claim,) = load_expectations(path, CATALOGUE)
    assert claim.bounds == Bounds(0.0, 3.0) and claim.applies("any", "cell")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("ttft_ms_p50", "ttft_p50_ms"), "expectations.yaml:5: .*did you mean 'ttft_ms_p50'"),
        (("at most 3x higher", "3 times higher"), "expectations.yaml:6: .*is no expectation"),
        (("aggregated-3x", "pd-1p2d"), "is the candidate itself"),
        (("candidate:", "kandidate:"), "did you mean 'candidate'"),
    ],
)
def test_a_bad_claim_names_its_line(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "expectations.yaml"
    path.write_text(GOOD.replace(*change))
    with pytest.raises(UsageProblem, match=message):
        load_expectations(path, CATALOGUE)
