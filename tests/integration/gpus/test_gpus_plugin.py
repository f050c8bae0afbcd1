"""What pytest says about GPUs that do not suffice, were not left empty, or were used by somebody else."""

from __future__ import annotations

from pathlib import Path

import pytest

INVENTORIES = Path(__file__).parents[2] / "data" / "inventories"

SUITE = """
import pytest

@pytest.mark.pdperf_cells("single")
def test_cell(measure):
    assert measure().invalid == ()
"""

RECORDED = """
from pathlib import Path

import pytest_pdperf.sites
from pytest_pdperf.gpus.inventory import load_recorded

pytest_pdperf.sites.read_inventory = lambda: load_recorded(Path({path!r}))
"""

SPOILT = """
import pytest_pdperf.sites


class Busy:
    def __init__(self, devices, own_pids):
        self.looks = 0

    def look(self):
        self.looks += 1

    def reasons(self):
        return ("GPU 0 was used by another process meanwhile, pid 99",) if self.looks else ()


pytest_pdperf.sites.ForeignUse = Busy
pytest_pdperf.sites.wait_emptied = lambda before: ("GPU-a: 9000 MiB in use, held by pid 4242 (8900 MiB) stuck",)
"""


def test_two_topologies_that_do_not_fit_are_both_named_with_what_fits(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pytester.makepyfile(SUITE)
    pytester.makeconftest(RECORDED.format(path=str(INVENTORIES / "recorded-h200-2x.json")))
    wanted = [
        "--gpus",
        "all",
        "--topology",
        "pd-1p2d-tp2,aggregated-3x,pd-1p1d",
        "--model",
        "m",
        "--engine",
        "vllm",
    ]
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *wanted)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = result.stdout.str() + result.stderr.str()
    for name, needs in (("pd-1p2d-tp2", 6), ("aggregated-3x", 3)):
        (line,) = [line for line in text.splitlines() if f"topology {name} needs" in line]
        assert f"needs {needs} GPUs" in line
        assert "--gpus gives 2; topologies that fit: " in line
        assert "pd-1p1d (2)" in line
    assert "topology pd-1p1d needs" not in text
    assert not list(pytester.path.glob("pdperf-results/*/logs")), "nothing was started"


def test_gpus_that_are_not_empty_again_are_an_error_of_the_topology(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    pytester.makeconftest(SPOILT)
    for name, text in {
        "topologies/one.yaml": "kind: aggregated\nroles:\n  server: {replicas: 1}\n",
        "workloads/small.yaml": "shapes: [64/48]\nconcurrency: [2]\nrequests: 12\nwarmups: 1\ntimeout_s: 30\n",
    }.items():
        path = pytester.path / "fixtures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    wanted = ["--engine", "sim", "--topology", "one", "--workload", "small"]
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *wanted)
    result.assert_outcomes(failed=1, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_cell*",
            "*one: tear-down left something behind*",
            "*GPU-a: 9000 MiB in use, held by pid 4242 (8900 MiB) stuck*",
        ]
    )
    assert "GPU 0 was used by another process meanwhile, pid 99" in result.stdout.str()
