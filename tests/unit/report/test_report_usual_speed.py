"""What a baseline's launches say of healthy speeds, and how far from them is still healthy."""

from __future__ import annotations

import json

import pytest

from pytest_pdperf.evidence.naming import Naming
from pytest_pdperf.evidence.speeds import Speed
from pytest_pdperf.report.usual_speed import KEY, SLOWER, speeds_of, usual_of


def cell(step_s: float, link_rate: float = 1.23456e9) -> Naming:
    whole = Speed(step_s, None, link_rate)
    return Naming(speeds={"decode-0": (whole, whole, whole)}, loading_s={"decode-0": 12.3456})


def test_a_launch_keeps_four_digits_of_what_is_known() -> None:
    kept = speeds_of(cell(0.00512345))
    row = {"step_s": 0.005123, "link_rate": 1.235e9}
    assert json.loads(kept["speeds"]) == {"decode-0": [row, row, row]}
    assert json.loads(kept["loading_s"]) == {"decode-0": 12.35}
    assert speeds_of(Naming(speeds={"decode-0": (Speed(),)})) == {}


def test_the_usual_speed_is_the_median_and_one_launch_widens_its_limit() -> None:
    usual = usual_of([speeds_of(cell(step)) for step in (0.005, 0.00502, 0.009, 0.00501, 0.00499)])
    level = usual.speeds["decode-0"][0]["step_s"]
    assert level.value == pytest.approx(0.00501)
    assert level.limit > 1.5, "a launch that was off by 80 % makes that usual"
    quiet = usual_of([speeds_of(cell(0.005))] * 5).speeds["decode-0"][2]["step_s"]
    assert quiet.limit == SLOWER
    alone = usual_of([speeds_of(cell(0.005))]).speeds["decode-0"][0]
    assert 1.14 < alone["step_s"].limit < 1.17
    assert 1.05 < alone["step_s"].suspected < 1.07
    assert alone["link_rate"].limit > alone["step_s"].limit, "links differ more from launch to launch"
    assert usual.loading_s["decode-0"].value == pytest.approx(12.35)


def test_what_is_not_there_is_said_and_not_guessed() -> None:
    assert usual_of([]).why_not == "there is no baseline to compare with"
    assert usual_of([{}, {"sm_mhz": "1500"}]).why_not == "the baseline's launches kept none"
    broken = [
        {KEY: text} for text in ("", "[]", "{", '{"d": 3}', '{"d": [{"step_s": "x"}, {"step_s": -1}, 4]}')
    ]
    assert usual_of(broken).why_not
    assert usual_of([*broken, speeds_of(cell(0.005))]).why_not == ""
