"""What a launch ran on, without secrets and without the name of the machine."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_pdperf.engines.base import Command
from pytest_pdperf.evidence.environment import (
    Environment,
    GpuRecord,
    compare_environments,
    host_hash,
    read_environment,
    selected_env,
    version_mismatch,
)
from pytest_pdperf.gpus.inventory import Gpu, Inventory, MigDevice
from pytest_pdperf.report.facts import facts_of


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    proc, etc = tmp_path / "proc", tmp_path / "etc"
    proc.mkdir()
    etc.mkdir()
    (proc / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\n\nprocessor\t: 1\nmodel name\t: x\n"
    )
    (proc / "meminfo").write_text("MemTotal:       16777216 kB\nMemFree:  1 kB\n")
    (etc / "machine-id").write_text("0123456789abcdef\n")
    return proc, etc


def test_machine_and_gpus_are_read(machine: tuple[Path, Path]) -> None:
    gpu = Gpu(index=0, uuid="GPU-1", name="H200", memory_mib=143771, sm_max_mhz=1980, links=("X", "NV18"))
    mig = Gpu(index=1, uuid="GPU-2", name="H100", memory_mib=1, mig_devices=(MigDevice(uuid="MIG-7"),))
    inventory = Inventory(driver="580.1", cuda="13.0", gpus=(gpu, mig))
    found = read_environment(
        uuids=("GPU-1", "MIG-7", "GPU-9"), inventory=inventory, environ={}, proc=machine[0], etc=machine[1]
    )
    assert (found.cpu, found.memory_gib, found.driver) == ("Fast CPU @ 3 GHz", 16.0, "580.1")
    assert found.gpus == (
        GpuRecord("H200", "GPU-1", 143771, 1980, None, ("X", "NV18")),
        GpuRecord("H100", "MIG-7", 1),
    )
    assert found.gpu_problem == "not in the inventory: GPU-9"
    assert Environment.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_numa_and_rdma_are_read_as_the_kernel_shows_them(machine: tuple[Path, Path], tmp_path: Path) -> None:
    for node in ("node0", "node1", "possible"):
        (tmp_path / "sys/devices/system/node" / node).mkdir(parents=True)
    for port, state in (("mlx5_0/ports/1", "4: ACTIVE"), ("mlx5_1/ports/1", "1: DOWN")):
        folder = tmp_path / "sys/class/infiniband" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(state + "\n")
        (folder / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (tmp_path / "sys/class/infiniband/broken/ports/1").mkdir(parents=True)
    gpu = Gpu(index=0, uuid="GPU-1", name="H200", memory_mib=1, numa_node=1)
    found = read_environment(
        uuids=("GPU-1",),
        inventory=Inventory(gpus=(gpu,)),
        environ={},
        proc=machine[0],
        etc=machine[1],
        sys=tmp_path / "sys",
    )
    assert found.numa_nodes == 2
    assert found.gpus[0].numa_node == 1
    assert found.rdma == (
        "mlx5_0/1 ACTIVE 400 Gb/sec (4X NDR)",
        "mlx5_1/1 DOWN 400 Gb/sec (4X NDR)",
    )
    assert Environment.from_json(json.loads(json.dumps(found.to_json()))) == found
    facts = facts_of(found.to_json())
    assert facts["NUMA nodes"] == "2" and facts["RDMA"].startswith("mlx5_0/1 ACTIVE 400 Gb/sec")


def test_holes_stay_holes(tmp_path: Path) -> None:
    found = read_environment(environ={}, proc=tmp_path, etc=tmp_path)
    assert found.memory_gib is None
    assert (found.driver, found.gpus) == ("", ())
    dark = read_environment(
        uuids=("GPU-1",), inventory=Inventory(problem="no driver"), environ={}, proc=tmp_path, etc=tmp_path
    )
    assert dark.gpu_problem == "no driver"


def test_secrets_do_not_survive_in_any_form() -> None:
    command = Command(
        ("vllm", "serve", "--api-key", "sesame-open-1", "--x=http://bob:hunter22@h/", "with space"),
        {"VLLM_API_KEY": "sesame-open-1", "UCX_TLS": "tcp", "VLLM_GONE": None},
    )
    environ = {
        "HF_TOKEN": "hf_abcdefghijklmnopqrst",
        "VLLM_NOTE": "key is hf_abcdefghijklmnopqrst",
        "HOME": "/root",
    }
    found = read_environment(
        commands={"prefill-0": command}, environ=environ, facts={"url": "http://a:secret9@b/"}
    )
    text = json.dumps(found.to_json())
    for secret in ("sesame-open-1", "hunter22", "hf_abcdefghijklmnopqrst", "secret9"):
        assert secret not in text
    assert found.env["prefill-0"] == {"UCX_TLS": "tcp", "VLLM_API_KEY": "***", "VLLM_GONE": ""}
    assert "HOME" not in found.env["host"]
    assert "'with space'" in found.commands["prefill-0"]


def test_only_steering_variables_are_kept() -> None:
    kept = selected_env({"NCCL_DEBUG": "INFO", "PATH": "/bin", "LD_PRELOAD": "x.so", "MY_TOKEN": "abcdefgh"})
    assert kept == {"LD_PRELOAD": "x.so", "NCCL_DEBUG": "INFO"}


def test_host_hash_is_stable_and_hides_the_name(machine: tuple[Path, Path]) -> None:
    first = host_hash(machine[1])
    assert first == host_hash(machine[1])
    assert len(first) == 12
    assert platform.node() not in first
    (machine[1] / "machine-id").write_text("another")
    assert host_hash(machine[1]) != first


BASE = Environment(
    host="aaa",
    kernel="6.1",
    cpu="c",
    cpus=8,
    memory_gib=64.0,
    driver="580.1",
    gpus=tuple(GpuRecord("H100 80GB", f"GPU-{i}", 81559) for i in range(4)),
    versions={"engine": "0.19.0"},
    facts={"transport": "tcp", "tensor_parallel": "2", "model": "m"},
)


@pytest.mark.parametrize(
    ("changed", "status", "word"),
    [
        (
            replace(BASE, gpus=tuple(GpuRecord("H200", g.uuid, 1) for g in BASE.gpus)),
            "not_comparable",
            "gpu_names",
        ),
        (replace(BASE, gpus=BASE.gpus[:2]), "not_comparable", "gpus: 4 -> 2"),
        (
            replace(BASE, facts={**BASE.facts, "transport": "rdma"}),
            "not_comparable",
            "transport: tcp -> rdma",
        ),
        (replace(BASE, versions={"engine": "0.21.0"}), "comparable_with_note", "0.19.0 -> 0.21.0"),
        (replace(BASE, driver="590.1"), "comparable_with_note", "driver: 580.1 -> 590.1"),
        (replace(BASE, host="bbb"), "comparable", ""),
        (replace(BASE, gpus=tuple(replace(g, uuid="GPU-x" + g.uuid) for g in BASE.gpus)), "comparable", ""),
    ],
)
def test_what_makes_two_environments_incomparable(changed: Environment, status: str, word: str) -> None:
    found = compare_environments(BASE, changed)
    assert found.status == status
    assert word in " ".join(found.blocking + found.notes)
    assert bool(found.blocking) == (status == "not_comparable")


@pytest.mark.parametrize(
    ("old", "new", "blocking"),
    [
        ({"model": "/a/qwen"}, {"model": "/b/qwen/"}, ()),
        ({"model": "/a/qwen"}, {"model": "/a/llama"}, ("model: qwen -> llama",)),
        ({"model": "/a/x", "model_digest": "1"}, {"model": "/b/y", "model_digest": "1"}, ()),
        (
            {"model": "/a/x", "model_digest": "1"},
            {"model": "/a/x", "model_digest": "2"},
            ("model: x (1) -> x (2)",),
        ),
        ({"model": "/a/x"}, {"model": "/b/x", "model_digest": "2"}, ()),
    ],
)
def test_a_model_is_what_it_holds_and_not_where_it_lies(
    old: dict[str, str], new: dict[str, str], blocking: tuple[str, ...]
) -> None:
    found = compare_environments(replace(BASE, facts=old), replace(BASE, facts=new))
    assert found.blocking == blocking


def test_the_running_server_knows_its_version_better_than_a_tag() -> None:
    assert version_mismatch("0.19.0", "runner:vllm0.30.0") is not None
    assert version_mismatch("0.30.0", "runner:vllm0.30.0") is None
    assert version_mismatch("unknown", "runner:vllm0.30.0") is None


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown keys: extra"):
        Environment.from_json({**BASE.to_json(), "extra": 1})
    with pytest.raises(ValueError, match="malformed"):
        Environment.from_json({"host": "x"})
