"""vLLM's command lines and environments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_pdperf.engines.base import Command, Programs
from pytest_pdperf.engines.registry import ENGINES, get_engine
from pytest_pdperf.engines.vllm import ENGINE, flags
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.topology import FlagValue, Role, Topology
from tests.unit.engines.engine_instances import NOWHERE, instance


def command(**kwargs: object) -> Command:
    return ENGINE.command(instance(**kwargs), NOWHERE)  # type: ignore[arg-type]


def value(argv: tuple[str, ...], flag: str) -> str:
    assert argv.count(flag) == 1, f"{flag} in {argv}"
    return argv[argv.index(flag) + 1]


def kv_config(argv: tuple[str, ...]) -> dict[str, object]:
    found = json.loads(value(argv, "--kv-transfer-config"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("args", "want"),
    [
        ({"max_model_len": 16384}, ["--max-model-len", "16384"]),
        ({"gpu_memory_utilization": 0.9}, ["--gpu-memory-utilization", "0.9"]),
        ({"enforce_eager": True}, ["--enforce-eager"]),
        ({"enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
        ({"dtype": None}, []),
        ({"cudagraph_capture_sizes": [1, 2, 4]}, ["--cudagraph-capture-sizes", "1", "2", "4"]),
        ({"speculative_config": {"b": 1, "a": "x"}}, ["--speculative-config", '{"a":"x","b":1}']),
    ],
)
def test_arguments_become_flags(args: dict[str, FlagValue], want: list[str]) -> None:
    assert flags(args) == want


def test_prefill_over_nixl_on_gpus() -> None:
    got = command(devices=("2", "3"), tp=2, args={"max_num_seqs": 64})
    assert got.argv[:3] == ("vllm", "serve", "/models/m")
    assert value(got.argv, "--served-model-name") == "served"
    assert value(got.argv, "--host") == "127.0.0.1"
    assert value(got.argv, "--port") == "8200"
    assert value(got.argv, "--tensor-parallel-size") == "2"
    assert value(got.argv, "--max-num-seqs") == "64"
    assert "--no-enable-prefix-caching" in got.argv
    assert "--load-format" not in got.argv
    assert "--enforce-eager" not in got.argv
    assert kv_config(got.argv) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "fail",
    }
    assert got.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert got.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert got.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert got.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert got.env["VLLM_HOST_IP"] == "127.0.0.1"
    assert got.env["HF_HUB_OFFLINE"] == "1"
    assert got.env["VLLM_PORT"] is None
    assert "UCX_TLS" not in got.env


def test_decode_is_the_consumer() -> None:
    assert kv_config(command(role=Role.DECODE).argv)["kv_role"] == "kv_consumer"


def test_device_uuids_are_passed_on_as_they_are() -> None:
    got = command(devices=("GPU-11111111", "MIG-22222222"))
    assert got.env["CUDA_VISIBLE_DEVICES"] == "GPU-11111111,MIG-22222222"
    assert "CUDA_DEVICE_ORDER" not in got.env


@pytest.mark.parametrize(
    ("transport", "has", "lacks"),
    [("tcp", "tcp", "cuda_ipc"), ("rdma", "rc", "cuda_ipc"), ("nvlink", "cuda_ipc", "rc")],
)
def test_a_transport_restricts_ucx(transport: str, has: str, lacks: str) -> None:
    tls = command(transport=transport).env["UCX_TLS"]
    assert tls is not None
    assert has in tls.split(",")
    assert lacks not in tls.split(",")
    assert "cuda_copy" in tls.split(",")


def test_aggregated_has_no_kv_transfer() -> None:
    got = command(role=Role.SERVER, connector=None)
    assert "--kv-transfer-config" not in got.argv
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in got.env
    assert "--tensor-parallel-size" not in got.argv


def test_mooncake_has_its_bootstrap_on_prefill_only() -> None:
    prefill, decode = command(connector="mooncake"), command(connector="mooncake", role=Role.DECODE)
    assert prefill.env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "8998"
    assert "VLLM_MOONCAKE_BOOTSTRAP_PORT" not in decode.env
    assert kv_config(decode.argv) == {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"}
    assert "MC_FORCE_TCP" not in prefill.env


def test_mooncake_over_tcp() -> None:
    got = command(connector="mooncake", transport="tcp")
    assert got.env["MC_FORCE_TCP"] == "1"
    assert kv_config(got.argv)["kv_connector_extra_config"] == {"mooncake_protocol": "tcp"}


@pytest.mark.parametrize(
    ("transport", "devices", "protocol"),
    [
        ("auto", "0", None),
        ("tcp", "0", "tcp"),
        ("rdma", "0", "rdma"),
        ("auto", "cpu", "tcp"),
        ("tcp", "cpu", "tcp"),
    ],
)
def test_a_transport_is_asked_of_mooncake(transport: str, devices: str, protocol: str | None) -> None:
    got = command(connector="mooncake", transport=transport, devices=(devices,))
    extra = kv_config(got.argv).get("kv_connector_extra_config")
    assert extra == ({"mooncake_protocol": protocol} if protocol else None)
    assert got.env.get("MC_FORCE_TCP") == ("1" if protocol == "tcp" else None)
    assert "UCX_TLS" not in got.env


def test_files_are_shared_in_a_folder_of_the_launch() -> None:
    for role in (Role.PREFILL, Role.DECODE):
        got = ENGINE.command(
            replace(instance(role, connector="example"), shared_dir=Path("/run/kv")), NOWHERE
        )
        config = kv_config(got.argv)
        assert config["kv_connector"] == "ExampleConnector"
        assert config["kv_connector_extra_config"] == {"shared_storage_path": "/run/kv"}
    mine = {"kv_transfer_config": {"kv_connector_extra_config": {"shared_storage_path": "/mnt"}}}
    own = replace(instance(connector="example", args=mine), shared_dir=Path("/run/kv"))  # type: ignore[arg-type]
    config = kv_config(ENGINE.command(own, NOWHERE).argv)
    assert config["kv_connector_extra_config"] == {"shared_storage_path": "/mnt"}, "what the user says wins"


def test_a_multi_connector_passes_through_untouched() -> None:
    """The topology says nixl, which is what the router and the side channel go by; vLLM gets what the user wrote."""
    parts = [
        {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"},
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"block_size": 64},
        },
    ]
    mine: dict[str, object] = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": parts},
    }
    for role, side in ((Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer")):
        got = command(role=role, args={"kv_transfer_config": mine})
        config = kv_config(got.argv)
        assert {key: config[key] for key in mine} == mine
        assert config["kv_role"] == side
        assert got.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"


def test_roles_may_differ_in_tensor_parallelism() -> None:
    prefill = command(tp=2, devices=("0", "1"))
    decode = command(role=Role.DECODE, devices=("2",))
    assert value(prefill.argv, "--tensor-parallel-size") == "2"
    assert prefill.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "--tensor-parallel-size" not in decode.argv
    assert decode.env["CUDA_VISIBLE_DEVICES"] == "2"


def test_cpu_has_the_settings_that_make_it_usable() -> None:
    got = command(devices=("cpu",))
    assert "--enforce-eager" in got.argv
    assert value(got.argv, "--distributed-executor-backend") == "uni"
    assert int(value(got.argv, "--kv-cache-memory-bytes")) == 134217728
    assert kv_config(got.argv)["kv_buffer_device"] == "cpu"
    env = got.env
    assert env["VLLM_TARGET_DEVICE"] == "cpu"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert env["VLLM_CPU_KVCACHE_SPACE"] is None
    assert (env["UCX_TLS"], env["UCX_NET_DEVICES"]) == ("tcp,sm,self", "lo")
    assert "CUDA_DEVICE_ORDER" not in env


def test_arguments_and_environment_of_the_topology_win() -> None:
    got = command(
        devices=("cpu",),
        args={
            "enable-prefix-caching": True,
            "kv_cache_memory_bytes": 1,
            "load_format": "dummy",
            "kv_transfer_config": {
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"a": 1},
            },
        },
        env={"UCX_TLS": "tcp", "OMP_NUM_THREADS": "2"},
    )
    assert "--enable-prefix-caching" in got.argv
    assert "--no-enable-prefix-caching" not in got.argv
    assert value(got.argv, "--kv-cache-memory-bytes") == "1"
    assert value(got.argv, "--load-format") == "dummy"
    config = kv_config(got.argv)
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"] == {"a": 1}
    assert config["kv_role"] == "kv_producer"
    assert (got.env["UCX_TLS"], got.env["OMP_NUM_THREADS"]) == ("tcp", "2")


@pytest.mark.parametrize("key", ["port", "served-model-name", "tensor_parallel_size", "data_parallel_size"])
def test_arguments_with_an_owner_are_refused_on_the_command_line_too(key: str) -> None:
    with pytest.raises(UsageProblem, match=rf"arguments of x-0: {key.replace('-', '_')} is"):
        command(args={key: 2})


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").write_text("")
    return Programs((tmp_path / "bin",))


def topology(**changes: object) -> Topology:
    base: dict[str, object] = {"name": "t", "kind": "pd", "roles": {"prefill": {}, "decode": {}}}
    return Topology.model_validate(base | changes)


def test_a_missing_program_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem) as caught:
        ENGINE.check(Programs((tmp_path,)), topology(), ("0",))
    text = str(caught.value)
    for part in ("pip install 'pytest-pdperf[vllm]'", "--engine-env", "--engine sim", str(tmp_path)):
        assert part in text


@pytest.mark.parametrize(
    ("changes", "devices", "want"),
    [
        ({"engine_args": {"port": 1}}, ("0",), r"t: engine_args\.port is decided by the launcher"),
        ({"engine_args": {"tensor-parallel-size": 2}}, ("0",), r"roles\.<role>\.tensor_parallel"),
        (
            {"roles": {"prefill": {"args": {"model": "x"}}, "decode": {}}},
            ("0",),
            r"t: roles\.prefill\.args\.model",
        ),
        ({"engine_args": {"data_parallel_size": 2}}, ("0",), r"data_parallel_size is 2"),
        (
            {"roles": {"prefill": {"tensor_parallel": 2}, "decode": {}}},
            ("cpu",),
            r"roles\.prefill\.tensor_parallel is 2",
        ),
        ({"kv_transfer": {"transport": "rdma"}}, ("cpu",), r"transport is 'rdma'"),
        (
            {"kv_transfer": {"connector": "mooncake", "transport": "nvlink"}},
            ("0",),
            r"'nvlink'.*connector 'nixl'",
        ),
    ],
)
def test_what_is_known_to_fail_is_refused(
    programs: Programs, changes: dict[str, object], devices: tuple[str, ...], want: str
) -> None:
    with pytest.raises(UsageProblem, match=want):
        ENGINE.check(programs, topology(**changes), devices)


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        ({}, ("0",)),
        ({"roles": {"prefill": {"tensor_parallel": 2}, "decode": {}}}, ("0", "1", "2")),
        ({"kv_transfer": {"connector": "mooncake", "transport": "tcp"}}, ("cpu",)),
        ({"engine_args": {"pipeline_parallel_size": 1}}, ("0",)),
        (
            {
                "kv_transfer": {"connector": "example"},
                "engine_args": {
                    "kv_transfer_config": {"kv_connector_extra_config": {"shared_storage_path": "/x"}}
                },
            },
            ("cpu",),
        ),
    ],
)
def test_what_can_work_is_let_through(
    programs: Programs, changes: dict[str, object], devices: tuple[str, ...]
) -> None:
    ENGINE.check(programs, topology(**changes), devices)


def test_version_comes_from_beside_the_program(programs: Programs, tmp_path: Path) -> None:
    assert ENGINE.version(programs) == "unknown"
    (tmp_path / "lib/python3.11/site-packages/vllm-0.32.0+cpu.dist-info").mkdir(parents=True)
    (tmp_path / "lib/python3.11/site-packages/vllm_router-0.1.17.dist-info").mkdir(parents=True)
    assert ENGINE.version(programs) == "0.32.0+cpu"


def test_an_unknown_engine_names_the_nearest() -> None:
    with pytest.raises(UsageProblem, match="'vlm' is not known; did you mean 'vllm'"):
        get_engine("vlm")


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_every_registered_engine_answers_to_its_name(name: str) -> None:
    assert get_engine(name).name == name
