"""The suite on a deployment found in a cluster: simulated engines and the real vllm-router play the pods."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.integration.places.kube_api import TOKEN, FakeCluster, FakePod, kube_api
from tests.integration.plugin_runs import measured_run, with_fixtures
from tests.integration.sim.sim_processes import house, until
from tests.integration.sim.test_sim_router import start_router

pytest.importorskip("kr8s", reason="the library kr8s is not installed (extra k8s)")

SUITE = """
import pytest

@pytest.mark.pdperf_cells("single")
def test_cell(measure, gate):
    gate.check(measure())
"""
RESTARTING = """
from pathlib import Path

import pytest_pdperf.measuring

whole = pytest_pdperf.measuring.run_cell

def run_cell(*args, **kwargs):
    records = whole(*args, **kwargs)
    Path({path!r}).touch()
    return records

pytest_pdperf.measuring.run_cell = run_cell
"""
CELL = "shapes: [64/24]\nconcurrency: [2]\nrequests: 8\nwarmups: 1\ntimeout_s: 60\n"
ARGUMENTS = [
    *(
        "--workload",
        "small",
        "-p",
        "no:cacheprovider",
        "--k8s",
        "llm",
        "--k8s-selector",
        "prefill=role=prefill",
    ),
    *("--k8s-selector", "decode=role=decode", "--k8s-selector", "router=role=router"),
]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCluster]:
    """A cluster with a PD deployment in it."""
    folder = tmp_path_factory.mktemp("cluster")
    with house(folder) as opened, kube_api(folder) as cluster:
        prefill, decode = opened.engine("prefill", wait=False), opened.engine("decode", wait=False)
        for engine in (prefill, decode):
            until(engine.answers, "engines are healthy")
        router = start_router(opened, prefill, [decode])
        cluster.pods = [
            FakePod("p", {"role": "prefill"}, prefill.url, prefill.log, gpus=1),
            FakePod(
                "d", {"role": "decode"}, decode.url, decode.log, gpus=1, restarts_with=folder / "restarted"
            ),
            FakePod("r", {"role": "router"}, router.url, router.log),
        ]
        cluster.nodes = {"node-a": {"nvidia.com/gpu.product": "LAB-GPU"}}
        yield cluster


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, api: FakeCluster) -> pytest.Pytester:
    """A user's repository, with the cluster as kubectl would have it."""
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))
    pytester.makepyfile(test_perf=SUITE)
    with_fixtures(pytester, {"workloads/small.yaml": CELL})
    return pytester


def test_pods_found_by_their_labels_are_measured_and_proven(
    project: pytest.Pytester, api: FakeCluster
) -> None:
    result = measured_run(project, *ARGUMENTS, "--update-baselines=create", timeout=180)
    assert result.parseoutcomes() == {"passed": 1}
    result.stdout.fnmatch_lines(
        ["*attached-1p1d*8/8*proven*", "*kubernetes: the load goes through a port-forward*"]
    )
    (stored,) = (project.path / "baselines").rglob("*.json")
    assert stored.parts[-4] == "attached-2x-lab-gpux0", "keyed by what the nodes say, not by a forward's port"
    (folder,) = (project.path / "pdperf-results").iterdir()
    assert "SIMULATED" in (folder / "logs" / "attached-1p1d" / "decode-0.log").read_text()
    facts = json.loads((folder / "environment" / "attached-1p1d.json").read_text())["facts"]
    assert facts["pod of decode-0"] == "pod d on node node-a, 1 x LAB-GPU"
    until(lambda: not api.forwards, "the forwards are closed")
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_a_pod_that_restarts_during_a_cell_fails_it(project: pytest.Pytester, api: FakeCluster) -> None:
    path = api.pods[1].restarts_with
    assert path is not None
    project.makeconftest(RESTARTING.format(path=str(path)))
    result = project.runpytest_subprocess(*ARGUMENTS, timeout=180)
    path.unlink()
    assert result.parseoutcomes() == {"failed": 1}
    result.stdout.fnmatch_lines(["*pod d: container vllm restarted (0 -> 1)*"])
