"""SGLang's command lines, environments and versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.engines.base import Command, Programs
from pytest_pdperf.engines.installed import python_of, site_folders, version_of
from pytest_pdperf.engines.registry import ENGINES, get_engine
from pytest_pdperf.engines.sglang import ENGINE, SAME_MEANING, flags, sglang_args, start_of
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.topology import FlagValue, Role, Topology
from tests.unit.engines.engine_instances import NOWHERE, instance


def command(programs: Programs = NOWHERE, **kwargs: object) -> Command:
    return ENGINE.command(instance(**kwargs), programs)  # type: ignore[arg-type]


def values(argv: tuple[str, ...], flag: str) -> list[str]:
    """What follows a flag that is there exactly once."""
    assert argv.count(flag) == 1, f"{flag} in {argv}"
    rest = argv[argv.index(flag) + 1 :]
    stop = next((i for i, part in enumerate(rest) if part.startswith("--")), len(rest))
    return list(rest[:stop])


def topology(**changes: object) -> Topology:
    base: dict[str, object] = {"name": "t", "kind": "pd", "roles": {"prefill": {}, "decode": {}}}
    return Topology.model_validate(base | changes)


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sglang").write_text("#!/bin/sh\n")
    return Programs((tmp_path / "bin",))


def test_prefill_and_decode_over_nixl() -> None:
    prefill = command(devices=("2", "3"), tp=2, args={"max_num_seqs": 64})
    assert prefill.argv[:4] == ("sglang", "serve", "--model-path", "/models/m")
    for flag, want in {
        "--served-model-name": ["served"],
        "--host": ["127.0.0.1"],
        "--port": ["8200"],
        "--nccl-port": ["21000"],
        "--tp-size": ["2"],
        "--max-running-requests": ["64"],
        "--disaggregation-mode": ["prefill"],
        "--disaggregation-transfer-backend": ["nixl"],
        "--disaggregation-bootstrap-port": ["8998"],
        "--enable-metrics": [],
        "--disable-radix-cache": [],
    }.items():
        assert values(prefill.argv, flag) == want
    decode = command(role=Role.DECODE).argv
    assert values(decode, "--disaggregation-mode") == ["decode"]
    assert "--disaggregation-bootstrap-port" not in decode, "decode learns it from the router"
    assert "--tp-size" not in decode


def test_aggregated_has_no_trace_of_disaggregation() -> None:
    got = command(role=Role.SERVER, connector=None)
    assert not [part for part in got.argv if "disaggregation" in part]
    assert "UCX_TLS" not in got.env


def test_gpus_are_handed_over_as_they_came_and_never_counted_from_a_base() -> None:
    got = command(devices=("5", "2"), tp=2)
    assert got.env["CUDA_VISIBLE_DEVICES"] == "5,2"
    assert got.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert not [part for part in got.argv if "gpu-id" in part]
    uuid = command(devices=("GPU-1111",))
    assert uuid.env["CUDA_VISIBLE_DEVICES"] == "GPU-1111"
    assert "CUDA_DEVICE_ORDER" not in uuid.env


def test_uuids_and_tensor_parallelism_would_lose_the_fast_all_reduce_in_silence() -> None:
    devices = ("GPU-1111", "GPU-2222")
    with pytest.raises(UsageProblem, match=r"x-0: .*'GPU-1111'.*disable_custom_all_reduce=true"):
        command(devices=devices, tp=2)
    asked = command(devices=devices, tp=2, args={"disable_custom_all_reduce": True})
    assert "--disable-custom-all-reduce" in asked.argv
    command(devices=("0", "1"), tp=2)


def test_each_rank_gets_the_numa_node() -> None:
    assert values(command(tp=2, devices=("0", "1"), numa=1).argv, "--numa-node") == ["1", "1"]
    assert "--numa-node" not in command().argv


def test_health_checks_generate_nothing_and_kv_stays_on_loopback() -> None:
    env = command().env
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert env["SGLANG_HOST_IP"] == "127.0.0.1"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert command(env={"SGLANG_HOST_IP": "10.0.0.1"}).env["SGLANG_HOST_IP"] == "10.0.0.1"


@pytest.mark.parametrize(
    ("connector", "transport", "name", "has", "lacks"),
    [
        ("nixl", "auto", "UCX_TLS", None, ""),
        ("nixl", "tcp", "UCX_TLS", "tcp", "cuda_ipc"),
        ("nixl", "rdma", "UCX_TLS", "rc", "cuda_ipc"),
        ("nixl", "nvlink", "UCX_TLS", "cuda_ipc", "rc"),
        ("mooncake", "tcp", "MC_FORCE_TCP", "1", "0"),
        ("mooncake", "rdma", "MC_FORCE_TCP", None, ""),
        ("mooncake", "auto", "UCX_TLS", None, ""),
    ],
)
def test_a_transport_is_forced(
    connector: str, transport: str, name: str, has: str | None, lacks: str
) -> None:
    got = command(connector=connector, transport=transport)
    assert values(got.argv, "--disaggregation-transfer-backend") == [connector]
    found = got.env.get(name)
    if has is None:
        assert found is None
    else:
        assert found is not None
        assert has in found.split(",")
        assert lacks not in found.split(",")


@pytest.mark.parametrize(
    ("args", "want"),
    [
        ({"context_length": 16384}, ["--context-length", "16384"]),
        ({"mem_fraction_static": 0.9}, ["--mem-fraction-static", "0.9"]),
        ({"trust_remote_code": True}, ["--trust-remote-code"]),
        ({"trust_remote_code": False}, []),
        ({"dtype": None}, []),
        ({"gc_threshold": [700, 10]}, ["--gc-threshold", "700", "10"]),
        ({"json_model_override_args": {"b": 1, "a": "x"}}, ["--json-model-override-args", '{"a":"x","b":1}']),
        (
            {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3},
            ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"],
        ),
    ],
)
def test_arguments_become_flags(args: dict[str, FlagValue], want: list[str]) -> None:
    assert flags(args) == want


@pytest.mark.parametrize(("common", "own"), SAME_MEANING.items())
def test_common_names_become_sglangs(common: str, own: str) -> None:
    assert sglang_args({common: 7}) == {"disable_radix_cache": True, own: 7}
    assert sglang_args({own: 7}) == {"disable_radix_cache": True, own: 7}


def test_the_names_that_shipped_topologies_use_are_known() -> None:
    got = command(args={"max_model_len": 16384, "max_num_seqs": 64, "gpu_memory_utilization": 0.9}).argv
    assert values(got, "--context-length") == ["16384"]
    assert values(got, "--max-running-requests") == ["64"]
    assert values(got, "--mem-fraction-static") == ["0.9"]


@pytest.mark.parametrize(
    ("args", "off"),
    [
        ({}, True),
        ({"enable_prefix_caching": False}, True),
        ({"enable_prefix_caching": True}, False),
        ({"disable_radix_cache": False}, False),
        ({"enable_prefix_caching": True, "disable_radix_cache": True}, True),
    ],
)
def test_the_prefix_cache_is_off_unless_asked_for(args: dict[str, FlagValue], off: bool) -> None:
    assert ("--disable-radix-cache" in command(args=args).argv) is off


@given(st.permutations(["max_model_len", "context_length"]))
def test_the_later_of_two_names_for_one_thing_wins(order: list[str]) -> None:
    assert sglang_args({order[0]: 1, order[1]: 2})["context_length"] == 2


@pytest.mark.parametrize(
    ("key", "owner"),
    [
        ("tp_size", "roles.<role>.tensor_parallel"),
        ("base-gpu-id", "placement"),
        ("model_path", "--model"),
        ("nccl_port", "the launcher"),
        ("disaggregation_mode", "the role"),
        ("disaggregation-transfer-backend", "kv_transfer.connector"),
    ],
)
def test_arguments_with_an_owner_are_refused_everywhere(programs: Programs, key: str, owner: str) -> None:
    name, want = key.replace("-", "_"), rf"is decided by {re.escape(owner)}"
    with pytest.raises(UsageProblem, match=rf"t: engine_args\.{name} {want}"):
        ENGINE.check(programs, topology(engine_args={key: 1}), ("0",))
    with pytest.raises(UsageProblem, match=rf"t: roles.decode.args\.{name} {want}"):
        ENGINE.check(programs, topology(roles={"prefill": {}, "decode": {"args": {key: 1}}}), ("0",))
    with pytest.raises(UsageProblem, match=rf"arguments of x-0: {name} {want}"):
        command(args={key: 1})


@pytest.mark.parametrize(
    ("changes", "devices", "want"),
    [
        (
            {"engine_args": {"dp_size": 2}},
            ("0",),
            r"dp_size is 2, but a role gets GPUs for tensor_parallel only",
        ),
        ({"engine_args": {"pipeline_parallel_size": 2}}, ("0",), r"pipeline_parallel_size is 2"),
        (
            {"engine_args": {"pp_size": 2, "enable_dp_attention": True}},
            ("0",),
            r"pp_size is 2",
        ),
        (
            {"engine_args": {"speculative_config": {}}},
            ("0",),
            r"speculative_config is vLLM's.*speculative_algorithm",
        ),
        (
            {"kv_transfer": {"connector": "example"}},
            ("0",),
            r"'example', which SGLang lacks; use 'nixl' or 'moonc",
        ),
        (
            {"kv_transfer": {"connector": "mooncake", "transport": "nvlink"}},
            ("0",),
            r"SGLANG_MOONCAKE_CUSTOM_MEM",
        ),
        ({}, ("cpu",), r"--gpus cpu works with --engine vllm"),
    ],
)
def test_what_is_known_to_fail_is_refused(
    programs: Programs, changes: dict[str, object], devices: tuple[str, ...], want: str
) -> None:
    with pytest.raises(UsageProblem, match=want):
        ENGINE.check(programs, topology(**changes), devices)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_transfer": {"connector": "mooncake", "transport": "tcp"}},
        {"engine_args": {"dp_size": 2, "enable_dp_attention": True}},
        {"engine_args": {"pipeline_parallel_size": 1}},
        {"kind": "aggregated", "roles": {"server": {"tensor_parallel": 2}}},
    ],
)
def test_what_can_work_is_let_through(programs: Programs, changes: dict[str, object]) -> None:
    ENGINE.check(programs, topology(**changes), ("0", "1"))


def test_a_missing_engine_names_both_ways_out() -> None:
    with pytest.raises(UsageProblem, match=r"pytest-pdperf\[sglang\].*--engine-env.*--engine sim-sglang"):
        ENGINE.check(NOWHERE, topology(), ("0",))


def test_a_colon_in_the_served_name_is_refused() -> None:
    with pytest.raises(UsageProblem, match="'a:b'"):
        command(served="a:b")


def test_an_environment_without_the_program_starts_the_module(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").write_text("")
    package = tmp_path / "lib/python3.12/site-packages/sglang"
    programs = Programs((tmp_path / "bin",))
    assert start_of(programs) is None
    package.mkdir(parents=True)
    (package / "launch_server.py").write_text("")
    got = command(programs)
    assert got.argv[:4] == (str(tmp_path / "bin/python3"), "-m", "sglang.launch_server", "--model-path")


def test_version_comes_from_beside_the_program(programs: Programs, tmp_path: Path) -> None:
    assert ENGINE.version(programs) == "unknown"
    assert ENGINE.version(NOWHERE) == "unknown"
    for name in ("sglang-0.5.17", "sglang_router-0.3.2", "sglang_kernel-0.4.5"):
        (tmp_path / f"lib/python3.12/site-packages/{name}.dist-info").mkdir(parents=True)
    assert ENGINE.version(programs) == "0.5.17"
    assert version_of(tmp_path / "bin/sglang", "sglang-router") == "0.3.2"


def test_version_behind_a_shell_wrapper_or_an_interpreter_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "site/sglang-0.6.0.dist-info").mkdir(parents=True)
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(
        f"#!/bin/sh\nPYTHONPATH={tmp_path}/other:{tmp_path}/site exec python3 -m sglang.cli.main\n"
    )
    assert version_of(wrapper, "sglang") == "0.6.0"
    (tmp_path / "env/lib/python3.12/site-packages/sglang-0.7.0.dist-info").mkdir(parents=True)
    script = tmp_path / "script"
    script.write_text(f"#!{tmp_path}/env/bin/python3.12\nimport sys\n")
    assert version_of(script, "sglang") == "0.7.0"
    assert python_of(script) == tmp_path / "env/bin/python3.12"
    assert python_of(wrapper) is None
    (tmp_path / "binary").write_bytes(b"\x7fELF\0#!/usr/bin/python3\n")
    assert python_of(tmp_path / "binary") is None
    assert list(site_folders(tmp_path / "none")) == []


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_the_name_of_an_engine_tells_whether_it_is_simulated(name: str) -> None:
    assert get_engine(name).simulated is (name.split("-", maxsplit=1)[0] == "sim")


def test_prompts_of_exact_length_go_to_generate() -> None:
    assert ENGINE.supported_prompts() == {"generate_ids", "text"}
