"""Which items xdist keeps together, and what the controller is told of a worker that is gone."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_pdperf.session import Session
from pytest_pdperf.workers import launch_of, unpack

LAUNCHES = ("pd-1p2d", "pd-1p2d-tp2", "pd-1p2d-launch2", "agg")


@pytest.mark.parametrize(
    ("nodeid", "launch"),
    [
        ("t.py::test_cell[pd-1p2d-in512-out256-c4]", "pd-1p2d"),
        ("t.py::test_cell[pd-1p2d-tp2-in512-out256-c4]", "pd-1p2d-tp2"),
        ("t.py::test_cell[pd-1p2d-launch2-in512-out256-c4]", "pd-1p2d-launch2"),
        ("t.py::test_cell[mine-agg-in512-out256-c4]", "agg"),
        ("t.py::test_greedy[agg]", "agg"),
        ("t.py::test_cell[aggregated-in512-out256-c4]", ""),
        ("agg.py::test_other", ""),
    ],
)
def test_items_belong_to_the_launch_that_stands_whole_among_their_parameters(
    nodeid: str, launch: str
) -> None:
    assert launch_of(nodeid, LAUNCHES) == launch


def test_a_worker_that_ends_without_a_word_is_a_problem_of_the_run() -> None:
    bench: Any = SimpleNamespace(problems=[])
    session = cast(Session, SimpleNamespace(bench=bench))
    unpack(session, "gw1", None)
    assert "worker gw1 ended before it could hand over its verdicts" in bench.problems[0]
