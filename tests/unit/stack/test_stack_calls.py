"""A run in pieces loses no cell, ends each piece in time, and pays every start-up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.stack.calls import divide
from scripts.gpu import calls as script


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c"]), st.lists(st.floats(1, 400), min_size=1, max_size=12), min_size=1
    )
)
def test_every_cell_once_in_order_and_no_call_too_long(durations: dict[str, list[float]]) -> None:
    cells = {name: [(f"c{i}", s) for i, s in enumerate(seconds)] for name, seconds in durations.items()}
    calls = divide(cells, start_up_s=150, limit_s=600)
    for name, wanted in cells.items():
        assert [cell for call in calls if call.topology == name for cell in call.cells] == [
            c for c, _ in wanted
        ]
    assert all(call.seconds <= 600 for call in calls)
    total = sum(s for seconds in durations.values() for s in seconds)
    assert sum(call.seconds for call in calls) == pytest.approx(total + 150 * len(calls))
    assert [call.resumes for call in calls] == [False] + [True] * (len(calls) - 1)


def test_cells_share_a_call_for_as_long_as_they_fit() -> None:
    calls = divide({"a": [("x", 200), ("y", 250), ("z", 1)]}, start_up_s=150, limit_s=600)
    assert [call.cells for call in calls] == [("x", "y"), ("z",)]


def test_a_cell_that_fits_no_call_is_named() -> None:
    with pytest.raises(UsageProblem, match=r"a x: 150 s start-up and 451 s .* fixed-shapes-short"):
        divide({"a": [("x", 451)]}, start_up_s=150, limit_s=600)


def test_the_script_prints_commands_that_resume(capsys: pytest.CaptureFixture[str]) -> None:
    given_ = [
        "--topology",
        "aggregated-3x-tp2,pd-1p2d-tp2",
        "--workload",
        "fixed-shapes-short",
        "--gpus",
        "0-5",
    ]
    assert script.main([*given_, "--limit", "600"]) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if line.startswith("scripts/gpu/suite.sh MODEL")]
    assert len(commands) == int(lines[-1].split()[1]) >= 2
    assert "--resume" not in commands[0]
    assert all("--resume" in command for command in commands[1:])
    for shape in ("in512-out256", "in4096-out128", "in8192-out128", "in256-out1024"):
        for concurrency in (1, 4, 8, 16):
            cell = f"{shape}-c{concurrency}"
            for topology in ("aggregated-3x-tp2", "pd-1p2d-tp2"):
                assert sum(f"[{topology}-{cell}]" in command for command in commands) == 1


def test_the_script_says_when_a_cell_is_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    given_ = ["--topology", "aggregated-3x-tp2", "--workload", "fixed-shapes", "--limit", "300"]
    assert script.main(given_) == 2
    assert "do not fit" in capsys.readouterr().err
