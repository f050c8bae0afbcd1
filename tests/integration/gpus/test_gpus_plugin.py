"""What pytest says about GPUs that do not suffice, were not left empty, or were used by somebody else."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from pytest_pdperf.gpus.grammar import parse_gpus, resolve
from pytest_pdperf.gpus.inventory import load_recorded
from pytest_pdperf.gpus.lease import acquire
from tests.integration.plugin_runs import with_fixtures

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
    with_fixtures(
        pytester,
        {
            "topologies/one.yaml": "kind: aggregated\nroles:\n  server: {replicas: 1}\n",
            "workloads/small.yaml": "shapes: [64/48]\nconcurrency: [2]\nrequests: 12\nwarmups: 1\ntimeout_s: 30\n",
        },
    )
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


SHARED = """
from pathlib import Path

import pytest_pdperf.sites
import pytest_pdperf.inputs
from pytest_pdperf.gpus.grammar import parse_gpus
from pytest_pdperf.gpus.inventory import load_recorded

pytest_pdperf.inputs._gpus = lambda *asked: parse_gpus("all")
pytest_pdperf.sites.read_inventory = lambda: load_recorded(Path({inventory!r}))
pytest_pdperf.sites.wait_emptied = lambda before: ()
"""


@pytest.fixture
def shared(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> tuple[pytest.Pytester, list[str]]:
    """Two topologies on the GPUs of a recorded machine, and the command line that measures them in two workers."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PDPERF_LEASE_DIR", str(pytester.path / "leases"))
    pytester.makepyfile(SUITE)
    pytester.makeconftest(SHARED.format(inventory=str(INVENTORIES / "pcie-l40s-4x.json")))
    server = "kind: aggregated\nroles:\n  server: {replicas: 1}\n"
    with_fixtures(
        pytester,
        {
            "topologies/one.yaml": server,
            "topologies/two.yaml": server,
            "workloads/small.yaml": "shapes: [64/48]\nconcurrency: [2]\nrequests: 12\nwarmups: 1\ntimeout_s: 30\n",
        },
    )
    wanted = ["--engine", "sim", "--model", "fast", "--topology", "one,two", "--workload", "small"]
    return pytester, ["-p", "no:cacheprovider", "-n", "2", *wanted]


def test_workers_of_one_run_have_the_gpus_one_after_the_other(
    shared: tuple[pytest.Pytester, list[str]],
) -> None:
    pytester, arguments = shared
    result = pytester.runpytest_subprocess(*arguments, timeout=300)
    assert result.parseoutcomes() == {"passed": 2}
    (run,) = (pytester.path / "pdperf-results").iterdir()
    lines = [(run / "logs" / name / "server-0.log").read_text().splitlines() for name in ("one", "two")]
    first, second = sorted((log[0][:23], log[-1][:23]) for log in lines)
    assert first[1] < second[0], "the second came up when the first was down"
    assert list((pytester.path / "leases").iterdir()) == []
    assert list((run / "turns").iterdir()) == []


def test_gpus_of_another_run_are_refused_before_any_worker_starts(
    shared: tuple[pytest.Pytester, list[str]],
) -> None:
    pytester, arguments = shared
    found = load_recorded(INVENTORIES / "pcie-l40s-4x.json")
    with acquire(resolve(parse_gpus("2"), found, None), command="the nightly"):
        result = pytester.runpytest_subprocess(*arguments, timeout=300)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: GPU 2 * is in use by process *: the nightly; wait for it or name other GPUs"]
    )


def test_who_waits_for_a_lease_is_not_refused_because_its_holder_computes(
    shared: tuple[pytest.Pytester, list[str]],
) -> None:
    """The GPUs are busy until the holder lets go of them."""
    pytester, arguments = shared
    free = INVENTORIES / "pcie-l40s-4x.json"
    seen = pytester.path / "seen"
    text = f"""
from pytest_pdperf.gpus.inventory import GpuProcess


def read():
    Path({str(seen)!r}).touch()
    found = load_recorded(Path({str(free)!r}))
    if not Path({str(pytester.path / "held")!r}).exists():
        return found
    users = (GpuProcess(pid=4242, used_mib=40_000, command="the holder's engine"),)
    gpus = tuple(gpu.model_copy(update={{"processes": users}}) for gpu in found.gpus)
    return found.model_copy(update={{"gpus": gpus}})


pytest_pdperf.sites.read_inventory = read
"""
    pytester.makeconftest(SHARED.format(inventory=str(free)) + text)
    held = pytester.path / "held"
    held.touch()
    lease = acquire(resolve(parse_gpus("all"), load_recorded(free), None))

    def let_go() -> None:
        while not seen.exists():
            time.sleep(0.05)
        time.sleep(0.5)
        held.unlink()
        lease.release()

    thread = threading.Thread(target=let_go, daemon=True)
    thread.start()
    alone = [word for word in arguments if word not in ("-n", "2")]
    result = pytester.runpytest_subprocess(*alone, "--gpu-wait", "120", "-k", "one", timeout=300)
    thread.join(10)
    assert result.parseoutcomes() == {"passed": 1, "deselected": 1}
    result.stdout.fnmatch_lines([f"pdperf: waiting: GPU * is in use by process {os.getpid()} since *"])
