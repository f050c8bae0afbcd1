"""A disk that is full after the first of two cells: the second is measured, told of and judged, and fails by name."""

import json

import pytest

from tests.integration.plugin_runs import measured_run, with_fixtures

SUITE = """
import pytest

@pytest.mark.pdperf_cells("single")
def test_cell(measure, gate):
    gate.check(measure())
"""
FULL = """
import errno, os
from pathlib import Path

write = Path.write_bytes

def write_bytes(path, page):
    if path.parent.name == "cells" and "-c2" in path.name:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(path, page)

Path.write_bytes = write_bytes
"""


def test_a_cell_that_the_disk_refuses_is_told_of_and_what_is_kept_is_resumed(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(test_perf=SUITE)
    pytester.makeconftest(FULL)
    with_fixtures(
        pytester,
        {
            "topologies/one.yaml": "kind: aggregated\nroles: {server: {replicas: 1}}\n",
            "workloads/small.yaml": "shapes: [64/8]\nconcurrency: [1, 2, 3]\nrequests: 6\nwarmups: 1\n",
        },
    )
    always = ("--engine", "sim", "--topology", "one", "--workload", "small", "-p", "no:cacheprovider")
    result = measured_run(pytester, *always, timeout=180)
    assert result.parseoutcomes() == {"passed": 1, "failed": 1, "errors": 1}
    (folder,) = (pytester.path / "pdperf-results").iterdir()
    refused = folder / "cells" / "one--in64-out8-c2.json"
    for lines in (
        [
            "*ERROR at setup of test_cell?one-in64-out8-c3?*",
            f"one: cannot write {refused}: No space left on device",
        ],
        [
            "*FAILURES*",
            "*test_cell?one-in64-out8-c2?*",
            f"cannot write {refused}: No space left on device",
            "kept: 1 measured cells in *",
            "in memory, and written by this run once there is room: one--in64-out8-c2.json",
            f"way out: make room there, then run again with --resume {folder.name}*",
        ],
        ["in64-out8-c1*6/6*", "in64-out8-c2*6/6*", "*warning: not kept: one--in64-out8-c2.json*"],
    ):
        result.stdout.fnmatch_lines(lines)
    assert "During handling" not in result.stdout.str()
    cells = json.loads((folder / "summary.json").read_text())["cells"]
    assert [(cell["cell"], cell["verdict"]) for cell in cells] == [
        ("in64-out8-c1", "NO_BASELINE"),
        ("in64-out8-c2", "NO_BASELINE"),
    ]
    (pytester.path / "conftest.py").unlink()
    resumed = measured_run(pytester, *always, "--resume", folder.name, timeout=180)
    assert resumed.parseoutcomes() == {"passed": 2, "deselected": 1}
