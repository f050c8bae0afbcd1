"""The whole way on a real Slurm with two nodes: roles are steps, the job goes when the run does, Slurm is quoted."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from pytest_pdperf.engines.sim.engine import SimEngine
from pytest_pdperf.errors import RoleDied, UsageProblem
from pytest_pdperf.routers.vllm_router import VllmRouter
from pytest_pdperf.slurm_site import SlurmSite
from pytest_pdperf.spec.topology import Topology
from pytest_pdperf.stack import procfs
from pytest_pdperf.stack.launch import launch
from pytest_pdperf.stack.plan import LaunchPlan, plan_launch
from pytest_pdperf.stack.slurm.asking import read_wish
from pytest_pdperf.stack.slurm.client import slurm
from pytest_pdperf.stack.slurm.job import JobHolder
from tests.integration.plugin_runs import with_fixtures
from tests.integration.stack.slurm_cluster import Cluster, lacking, slurm_cluster
from tests.integration.stack.stack_fakes import PROGRAMS

SUITE = """
import pytest

@pytest.mark.pdperf_cells("single")
def test_cell(measure):
    # Not judged: where the client is starved of CPU that is the host's fault.
    result = measure()
    assert result.ok == result.requests == 12
"""
CELL = "shapes: [64/48]\nconcurrency: [2]\nrequests: {requests}\nwarmups: 1\ntimeout_s: 60\n"
PATIENCE_S = 60.0
"""For what takes well under a second on an idle machine."""


@pytest.fixture(scope="module")
def slurm_here(tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster]:
    """One cluster for all tests of this module."""
    reason = lacking()
    if reason:
        pytest.skip(reason)
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def cluster(slurm_here: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, for this process's own calls too; no test may leave a job behind."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", str(slurm_here.conf))
    yield slurm_here
    assert slurm_here.jobs() == []


def until(true: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {patience_s:g} s"
        time.sleep(0.1)


def project(pytester: pytest.Pytester, requests: int) -> list[str]:
    """A user's repository with one cell; the arguments that run it over both nodes."""
    pytester.makepyfile(test_perf=SUITE)
    with_fixtures(pytester, {"workloads/one.yaml": CELL.format(requests=requests)})
    places = ("--engine=sim", "--launcher=slurm", "--topology=pd-1p2d", "--workload=one")
    return [
        *places,
        "--slurm-arg=nodes=2",
        "--slurm-arg=time=5",
        "--require-baseline=no",
        "-v",
    ]


def test_prefill_and_decode_on_two_nodes_are_measured_and_the_job_is_given_back(
    cluster: Cluster, pytester: pytest.Pytester
) -> None:
    result = pytester.runpytest_subprocess(*project(pytester, 12), timeout=240)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "pdperf: Slurm job * on n1 (2 GPUs, * CPUs), n2 (2 GPUs, * CPUs), until *",
            "*in64-out48-c2*pd-1p2d*12/12*proven*",
        ]
    )
    logs = next((pytester.path / "pdperf-results").glob("*/logs/pd-1p2d"))
    said = {path.stem: path.read_text() for path in logs.glob("*.log")}
    steps = {
        name: re.search(r"pdperf step \S+ on (n\d), CUDA_VISIBLE_DEVICES (\S+),", text)
        for name, text in said.items()
    }
    where = {name: (step[1], step[2]) for name, step in steps.items() if step}
    assert where.keys() == {"prefill-0", "decode-0", "decode-1", "router"}
    assert where["prefill-0"][0] == where["router"][0] == "n1"
    assert where["router"][1] == "unset", "a router needs no GPU"
    assert {where["decode-0"], where["decode-1"]} == {("n2", "0"), ("n2", "1")}, (
        "one GPU of the other node each"
    )
    assert "Shutting down." in said["decode-0"], "SIGTERM came before SIGKILL"


def test_the_job_ends_with_a_pytest_that_is_killed(cluster: Cluster, pytester: pytest.Pytester) -> None:
    out = pytester.path / "out.txt"
    with out.open("wb") as file:
        pytest_run = subprocess.Popen(
            [sys.executable, "-m", "pytest", *project(pytester, 4000)],
            stdout=file,
            stderr=file,
            cwd=pytester.path,
        )
    try:
        until(lambda: "pd-1p2d up in" in out.read_text() or pytest_run.poll() is not None, "up", 180.0)
        assert pytest_run.poll() is None, out.read_text()
        assert len(cluster.jobs()) == 1
        run_id = next((pytester.path / "pdperf-results").iterdir()).name
        assert len(procfs.marked(run_id)) >= 8, "four roles, each with srun and a reaper"
    finally:
        pytest_run.kill()
        pytest_run.wait()
    until(lambda: cluster.jobs() == [], "the job is gone")
    until(lambda: procfs.marked(run_id) == [], "every process is gone")


def site(
    tmp_path: Path, *wishes: str, gres: str = "gpu", wait_s: float = PATIENCE_S, job: str | None = None
) -> SlurmSite:
    """A site whose words go nowhere; inside of `job` when that is given."""
    return SlurmSite(
        wish=read_wish(wishes),
        gres=gres,
        gpus=True,
        simulated=True,
        wait_s=wait_s,
        run_id=f"test-{os.getpid()}",
        log=tmp_path / f"job-{time.monotonic_ns()}.log",
        tell=lambda text: None,
        environ={"SLURM_JOB_ID": job} if job else {},
    )


def pd() -> Topology:
    return Topology.model_validate({"name": "pd", "kind": "pd", "roles": {"prefill": {}, "decode": {}}})


def plan_on(there: SlurmSite, tmp_path: Path) -> LaunchPlan:
    return plan_launch(
        pd(),
        SimEngine(),
        VllmRouter(),
        placement=there.visible(pd()),
        model="fast",
        served_model="fast",
        programs=PROGRAMS,
        log_dir=tmp_path / "logs",
        run_id="slurm-test",
        ports=there.ports,
        launcher=there.launcher(pd()),
    )


def test_what_slurm_does_not_have_is_told_with_what_it_has(cluster: Cluster, tmp_path: Path) -> None:
    def refused(pattern: str, *wishes: str, gres: str = "gpu", plan: bool = False) -> None:
        there = site(tmp_path, *wishes, gres=gres)
        with pytest.raises(UsageProblem, match=pattern):
            there.prepare([pd()], in_turn=False)
            if plan:
                there.describe()
            else:
                there.reserve()
        assert there.release() == ()

    refused(r"--slurm-gres gpu:h100: no node of partition main .* sinfo lists gpu;", gres="gpu:h100")
    refused(r"sinfo lists no usable node in partition nope|Invalid partition", "partition=nope")
    refused(r"Slurm would refuse the job: .*not available", "mem=50G", plan=True)
    refused(r"refused the job: .*not available[\s\S]*asked with: salloc .*--mem=50G", "mem=50G")
    refused(r"job \d+ could never start \(Partition\w+\) and was cancelled", "time=3-0")


def test_a_job_that_pends_tells_why_and_is_cancelled_at_the_deadline(
    cluster: Cluster, tmp_path: Path
) -> None:
    owner = site(tmp_path, "nodes=2", "exclusive")
    owner.prepare([pd()], in_turn=False)
    owner.reserve()
    told: list[str] = []
    holder = JobHolder(
        ("salloc", "--job-name=waits", "--nodes=2", "--gres=gpu:2", "sleep", "infinity"),
        slurm,
        log=tmp_path / "waits.log",
        run_id="waits",
        environ={},
        clock=lambda: 1e6 if any("Resources" in text for text in told) else time.monotonic() % 1.0,
    )
    with pytest.raises(
        UsageProblem, match=r"job \d+ is still pending \(Resources\) after 60 s and was cancelled"
    ):
        holder.wait(60.0, told.append)
    assert re.search(r"Slurm job \d+ is pending: Resources", "\n".join(told))
    assert [job.split()[1] for job in cluster.jobs()] == ["RUNNING"], "only the other's job is left"
    assert owner.release() == ()


def test_inside_of_a_job_its_nodes_are_used_and_it_goes_on_afterwards(
    cluster: Cluster, tmp_path: Path
) -> None:
    owner = site(tmp_path)
    owner.prepare([pd()], in_turn=False)
    owner.reserve()
    try:
        (number,) = (job.split()[0] for job in cluster.jobs())
        with pytest.raises(UsageProblem, match=f"runs inside Slurm job {number}, whose size is decided"):
            site(tmp_path, "nodes=2", job=number).prepare([pd()], in_turn=False)
        guest = site(tmp_path, job=number)
        guest.prepare([pd()], in_turn=False)
        guest.reserve()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            asked = [("prefill-0", "http", port)]
            assert guest.launcher(pd()).taken(asked) == (f"prefill-0: http port {port} is taken on n1",)
        with launch(plan_on(guest, tmp_path), deadline_s=PATIENCE_S) as stack:
            stack.check()
            stack.processes["decode-0"].kill()

            def died() -> bool:
                try:
                    stack.check()
                except RoleDied as death:
                    assert death.instance == "decode-0"
                    assert re.match(r"killed by SIGKILL on n1: .*(CANCELLED|Terminat)", death.reason), death
                    return True
                return False

            until(died, "the killed step is noticed")
        assert stack.leftovers == ()
        assert guest.release() == ()
        assert [job.split()[0] for job in cluster.jobs()] == [number], "the job is not ours to end"
        cluster.ask("scancel", number)
        until(lambda: cluster.jobs() == [], "cancelled from outside")
        with pytest.raises(UsageProblem, match=f"job {number} has ended .*--resume"):
            owner.check()
    finally:
        assert owner.release() == ()
