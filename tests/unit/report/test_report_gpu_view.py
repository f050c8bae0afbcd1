"""A GPU's curves show what was sampled, mark where it throttled, and draw nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.report.gpu_view import gpu_figures
from pytest_pdperf.report.html import render
from pytest_pdperf.report.source import Run
from tests.unit.report.report_data import outcome

TRACE: dict[str, Any] = {
    "uuid": "GPU-1",
    "t_s": [0.0, 1.0, 2.0, 3.0],
    "sm_mhz": [1980, 1980, 1200, 1980],
    "power_w": [400.0, 650.5, None, 500.0],
    "temperature_c": [None, None, None, None],
    "throttled": [[], None, ["software power cap"], []],
}
SECOND = {**TRACE, "uuid": "GPU-2", "throttled": [[], [], [], []]}


def figures(*traces: Any) -> list[tuple[str, ElementTree.Element, str]]:
    made = replace(outcome(), details={"gpu_trace": list(traces)})
    found = list(gpu_figures(made, "pd"))
    return [(one.title, ElementTree.fromstring(str(one.picture)), one.caption) for one in found]


def test_every_gpu_is_a_line_and_a_throttled_moment_a_mark() -> None:
    clock, power = figures(TRACE, SECOND)
    assert (clock[0], power[0]) == ("SM clock, MHz: pd", "Power, W: pd"), "nobody told a temperature"
    for _, picture, caption in (clock, power):
        assert [one.attrib["class"] for one in picture.iter("g") if "class" in one.attrib] == ["c0", "c1"]
        (mark,) = (one for one in picture.iter("line") if one.attrib["class"] == "hot")
        ticks = {
            one.text: float(one.attrib["x"]) for one in picture.iter("text") if "mid" in one.attrib["class"]
        }
        assert float(mark.attrib["x1"]) == pytest.approx(ticks["2"], abs=0.1), "at its second"
        assert caption == "red: throttled (GPU 0: software power cap)"
    titles = [one.text or "" for one in clock[1].iter("title")]
    assert titles[0].startswith("GPU 0: SM clock 1,200 to 1,980; GPU 0 (GPU-1) at 3 s: 1980 MHz")
    assert "throttled at 2 s, GPU 0: software power cap" in titles


def test_a_lower_clock_lies_lower() -> None:
    (_, picture, _), *_ = figures({**SECOND, "t_s": [0.0, 1.0], "sm_mhz": [2000, 1000]})
    path = next(one.attrib["d"] for one in picture.iter("path") if one.attrib["class"] == "curve")
    assert "l" in path and float(path.rpartition(" ")[2]) > 0, "down is positive"


def test_without_throttling_there_is_no_mark_and_no_caption() -> None:
    for _, picture, caption in figures(SECOND):
        assert caption == "" and not [one for one in picture.iter("line") if one.attrib["class"] == "hot"]


def test_where_nothing_was_sampled_nothing_is_drawn() -> None:
    assert figures() == []
    assert list(gpu_figures(outcome(), "pd")) == []
    made = (replace(outcome(), details={"gpu_trace": [TRACE]}), outcome("in512-out256-c4"))
    page = "".join(render([Run(name="r", folder=Path("r"), outcomes=made)]))
    assert page.count("GPUs over time") == 1 and page.count('aria-label="SM clock over time"') == 1


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*TRACE, "x"]), inner),
    max_leaves=20,
)


@given(plain)
def test_no_shape_of_data_is_an_error(trace: object) -> None:
    list(gpu_figures(replace(outcome(), details={"gpu_trace": trace}), "pd"))
    list(gpu_figures(replace(outcome(), details={"gpu_trace": [trace]}), "pd"))
