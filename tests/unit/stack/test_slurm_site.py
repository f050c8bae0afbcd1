"""Where a run on Slurm may go before it has a job: what is planned, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.slurm_site import NOT_LOOKED, SlurmSite, check_addresses
from pytest_pdperf.spec.topology import Topology
from pytest_pdperf.stack.slurm import probe
from pytest_pdperf.stack.slurm.asking import Wish
from pytest_pdperf.stack.slurm.client import Answer
from pytest_pdperf.stack.slurm.job import Job, JobNode
from pytest_pdperf.stack.slurm.launcher import NodeFacts, ask_nodes
from tests.unit.stack.slurm_recorded import Recorded


def site(run: Recorded, tmp_path: Path, *, simulated: bool = False, gpus: bool = True) -> SlurmSite:
    return SlurmSite(
        wish=Wish(),
        gres="gpu",
        gpus=gpus,
        simulated=simulated,
        wait_s=0.0,
        run_id="r",
        log=tmp_path / "log",
        tell=lambda text: None,
        run=run,
        environ={},
    )


CLUSTER: Mapping[str, Answer | str] = {
    "srun --version": "slurm 23.11.4",
    "sinfo": "a|gpu*|gpu:h100:8|128|idle\nb|gpu*|gpu:h100:8|128|idle\n",
    "scontrol show config": "AccountingStorageType   = x\nClusterName             = alps\n",
    "sbatch --test-only": Answer(0, "", "sbatch: Job 99 to start at 2026-12-01T00:00:00 using 68 processors"),
}


def topology(tp: int, placement: Mapping[str, list[int]] | None = None) -> Topology:
    roles = {"prefill": {"tensor_parallel": tp}, "decode": {"replicas": 2, "tensor_parallel": tp}}
    return Topology.model_validate({"name": "t", "kind": "pd", "roles": roles, "placement": placement or {}})


def test_a_topology_that_outgrows_a_node_is_planned_over_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    there = site(Recorded(CLUSTER), tmp_path)
    there.prepare([topology(4)], in_turn=False)
    assert there.explain("t") == [
        "prefill-0: node NODE0: 4 GPUs that Slurm chooses, 126 CPUs",
        "decode-0: node NODE1: 4 GPUs that Slurm chooses, 64 CPUs",
        "decode-1: node NODE1: 4 GPUs that Slurm chooses, 64 CPUs",
        "router: node NODE0: no GPU, 2 CPUs",
    ]
    assert there.visible(topology(4))["decode-1"] == ("0", "1", "2", "3")
    shown = "\n".join(there.describe())
    assert "--nodes=2 " in shown and "--gres=gpu:8 " in shown
    assert "Slurm expects the job to start at 2026-12-01T00:00:00 using 68 processors" in shown
    assert there.unknown == (NOT_LOOKED,), "a cell says that nobody looked at its GPUs"
    hardware = there.hardware()
    assert (hardware.model, hardware.count, hardware.link) == ("alps gpu of unknown model", 12, "2 nodes")


def test_simulated_engines_take_gpus_of_slurm_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    rehearsal = site(Recorded(CLUSTER), tmp_path, simulated=True)
    rehearsal.prepare([topology(1)], in_turn=False)
    assert "--gres=gpu:3" in " ".join(rehearsal.describe()) and rehearsal.unknown == ()
    assert rehearsal.visible(topology(1)) == {"prefill-0": (), "decode-0": (), "decode-1": ()}
    without = site(Recorded(CLUSTER), tmp_path, gpus=False)
    without.prepare([topology(1)], in_turn=False)
    assert "--gres" not in " ".join(without.describe())
    assert without.visible(topology(1))["decode-0"] == ("cpu",)


def test_positions_in_a_list_of_gpus_mean_nothing_to_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    with pytest.raises(UsageProblem, match=r"placement\.prefill-0 names positions in the --gpus list"):
        site(Recorded(CLUSTER), tmp_path).prepare([topology(1, {"prefill-0": [0]})], in_turn=False)


def test_this_process_may_listen_where_the_probe_says(monkeypatch: pytest.MonkeyPatch) -> None:
    answer: list[str] = []
    monkeypatch.setattr("sys.argv", ["-c", '{"n1": []}'])
    monkeypatch.setattr("builtins.print", answer.append)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.delenv("SLURM_LAUNCH_NODE_IPADDR", raising=False)
    probe.main()
    found = ask_nodes(Recorded({"srun": answer[0]}), Job("7", (JobNode("n1", 4, 1),), ours=True))
    assert found["n1"].address == "127.0.0.1" and found["n1"].kernel == os.uname().release


def test_a_node_that_others_cannot_reach_is_refused() -> None:
    near, far = NodeFacts("a", "127.0.1.1"), NodeFacts("b", "10.0.0.2")
    with pytest.raises(UsageProblem, match=r"node a has the address 127\.0\.1\.1 here"):
        check_addresses({"a": near, "b": far})
    check_addresses({"a": near})
    check_addresses({"b": far, "c": NodeFacts("c", "10.0.0.3")})
