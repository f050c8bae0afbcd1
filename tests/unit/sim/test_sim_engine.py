"""The simulated engine behind the `Engine` interface: command lines, checks, log lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_pdperf.engines.base import Instance, Ports, Programs
from pytest_pdperf.engines.sim.app import SimEngine
from pytest_pdperf.engines.sim.connector import Transfer
from pytest_pdperf.engines.sim.engine import ENGINE
from pytest_pdperf.engines.sim.log import Log
from pytest_pdperf.engines.sim.server import parse_arguments, settings_of
from pytest_pdperf.engines.sim.windows import Windows
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.evidence.kv_logs import KvWindow, parse_kv_windows
from pytest_pdperf.spec.topology import FlagValue, Kind, KvTransfer, Role, RoleSpec, Topology

PROGRAMS = Programs(())


def engine_with(connector: str, lines: list[str], *options: str) -> SimEngine:
    """A decode engine without sockets that writes its log into `lines`."""
    argv = ["--role", "decode", "--port", "1", "--served-model-name", "m", "--kv-connector", connector]
    return SimEngine(settings_of(parse_arguments([*argv, *options])), Log(lines.append))


def instance(
    role: Role = Role.DECODE, args: Mapping[str, FlagValue] | None = None, model: str = "fast"
) -> Instance:
    return Instance(
        id=f"{role.value}-0",
        role=role,
        ports=Ports(http=8000, side_channel=5600),
        devices=(),
        tensor_parallel=2,
        model=model,
        served_model="m",
        args=args or {},
        env={"A": "b"},
        kv_transfer=None if role is Role.SERVER else KvTransfer(transport="rdma"),
    )


def topology(**changes: object) -> Topology:
    given: dict[str, object] = {
        "name": "t",
        "kind": Kind.PD,
        "roles": {Role.PREFILL: RoleSpec(), Role.DECODE: RoleSpec()},
    }
    return Topology.model_validate(given | changes)


@pytest.mark.parametrize("role", list(Role))
def test_the_command_is_understood_by_the_server(role: Role) -> None:
    args: dict[str, FlagValue] = {
        "max_model_len": 4096,
        "max-num-seqs": 8,
        "gpu_memory_utilization": 0.9,
        "faults": "leak=0.5",
        "seed": 7,
        "enable_prefix_caching": None,
    }
    command = ENGINE.command(instance(role, args), PROGRAMS)
    assert command.argv[:3] == (sys.executable, "-m", "pytest_pdperf.engines.sim.server")
    assert command.env == {"A": "b"}
    options = parse_arguments(command.argv[3:])
    settings = settings_of(options)
    assert settings.role is role
    assert (settings.max_model_len, settings.max_seqs) == (4096, 8)
    assert settings.faults.leak.probability == 0.5
    assert settings.served_model == "m"
    assert settings.profile.name == "fast"
    assert settings.tensor_parallel == 2
    assert settings.link == ("tcp" if role is Role.SERVER else "rdma")
    assert options.port == 8000
    assert options.ignored == "gpu_memory_utilization"
    assert "7" in settings.seed and f"{role.value}-0" in settings.seed
    assert settings.side_channel_port == (5600 if role is Role.PREFILL else 0)


def test_two_instances_of_a_role_have_noise_of_their_own() -> None:
    def seed(name: str) -> str:
        from dataclasses import replace

        return settings_of(
            parse_arguments(ENGINE.command(replace(instance(), id=name), PROGRAMS).argv[3:])
        ).seed

    assert seed("decode-0") == seed("decode-0") != seed("decode-1")


def test_no_model_means_the_fast_profile() -> None:
    assert "fast" in ENGINE.command(instance(model=""), PROGRAMS).argv


def test_a_structured_value_for_a_known_flag_is_a_usage_problem() -> None:
    with pytest.raises(UsageProblem, match="expected one value"):
        ENGINE.command(instance(args={"max_model_len": [1]}), PROGRAMS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", "x"),
        ("max_num_seqs", 1.5),
        ("max_model_len", 0),
        ("max_num_batched_tokens", True),
        ("num_gpu_blocks_override", -1),
        ("kv_lease_s", "soon"),
    ],
)
def test_a_number_that_is_none_is_refused_before_a_start(name: str, value: FlagValue) -> None:
    with pytest.raises(UsageProblem, match=rf"decode-0: {name} is {value!r}, want a .*number above 0"):
        ENGINE.command(instance(args={name: value}), PROGRAMS)
    assert "0.5" in ENGINE.command(instance(args={"kv_lease_s": 0.5}), PROGRAMS).argv


def test_a_misspelt_argument_is_not_one_of_a_real_engine() -> None:
    with pytest.raises(UsageProblem, match="unknown 'max_num_seq', did you mean 'max_num_seqs'"):
        ENGINE.command(instance(args={"max_num_seq": 3}), PROGRAMS)
    assert "--ignored" in ENGINE.command(instance(args={"compilation_config": 3}), PROGRAMS).argv


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"engine_args": {"faults": "leek=1"}},
            "engine_args.faults: unknown fault 'leek', did you mean 'leak'",
        ),
        ({"engine_args": {"faults": 3}}, "expected text"),
        (
            {"roles": {"prefill": {"args": {"faults": "link=0"}}, "decode": {}}},
            "roles.prefill.args.faults: link=0",
        ),
        ({"engine_args": {"max_model_length": 4}}, "did you mean 'max_model_len'"),
    ],
)
def test_problems_are_found_before_anything_starts(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        ENGINE.check(PROGRAMS, topology(**changes), ())
    assert said in str(caught.value)
    assert "'t'" in str(caught.value)


def test_a_topology_for_real_engines_passes() -> None:
    args = {"max_model_len": 16384, "max_num_seqs": 64, "gpu_memory_utilization": 0.9, "block_size": 16}
    ENGINE.check(PROGRAMS, topology(engine_args=args), ())
    aggregated = Topology(name="a", kind=Kind.AGGREGATED, roles={Role.SERVER: RoleSpec()})
    ENGINE.check(PROGRAMS, aggregated, ())


def test_stages_and_root_causes_come_from_real_log_lines() -> None:
    lines: list[str] = []
    log = Log(lines.append)
    log.info("Starting to load model fast...")
    log.info("Application startup complete.")
    log.warning("nothing bad")
    log.error("first trouble")
    log.error("second trouble")
    assert [ENGINE.stage(line) for line in lines] == ["loading weights", "ready", None, None, None]
    cause = ENGINE.root_cause(lines)
    assert cause is not None and "first trouble" in cause
    assert ENGINE.root_cause(lines[:3]) is None
    trace = ["Traceback (most recent call last):", '  File "x"', "ValueError: no", ""]
    assert ENGINE.root_cause(trace) == "ValueError: no"


def test_what_it_says_of_itself() -> None:
    assert ENGINE.simulated
    assert (ENGINE.name, ENGINE.default_router) == ("sim", "vllm_router")
    assert "simulated" in ENGINE.version(PROGRAMS)
    assert ENGINE.supported_prompts() == {"token_ids", "text"}


MIB = 1 << 20
SHARED = (
    "Num successful transfers=2",
    "Avg xfer time (ms)=10.0,",
    "P90 xfer time (ms)=11.6,",
    "Avg MB per transfer=48.0,",
    "Throughput (MB/s)=4800.0,",
    "Avg number of descriptors=6.0,",
)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("connector", ["nixl", "mooncake", "example"])
def test_the_connector_reaches_the_server_with_what_it_needs(
    connector: str, role: Role, tmp_path: Path
) -> None:
    one = replace(
        instance(role),
        ports=Ports(http=8000, side_channel=5600, bootstrap=8998),
        kv_transfer=KvTransfer.model_validate({"connector": connector}),
        shared_dir=tmp_path if connector == "example" else None,
    )
    settings = settings_of(parse_arguments(ENGINE.command(one, PROGRAMS).argv[3:]))
    assert settings.connector == connector
    assert settings.bootstrap_port == (8998 if (connector, role) == ("mooncake", Role.PREFILL) else 0)
    assert settings.shared_storage == (tmp_path if connector == "example" else None)


@pytest.mark.parametrize(
    ("connector", "shown", "absent"),
    [
        ("nixl", (*SHARED, "Avg post time (ms)=3.0,", "Num failed transfers=3,"), "recvs"),
        ("mooncake", (*SHARED, "Num failed transfers=0, Num failed recvs=3,"), "post time"),
    ],
)
def test_the_transfer_window_in_the_log(connector: str, shown: tuple[str, ...], absent: str) -> None:
    lines: list[str] = []
    engine = engine_with(connector, lines)
    windows = Windows(engine.log, engine.metrics, lambda: (1, 2, 0.5), engine.connector)
    windows.transfers = [Transfer(0.008, 0.002, 32 * MIB, 4), Transfer(0.012, 0.004, 64 * MIB, 8)]
    engine.metrics.failed_transfers = 3
    windows.tick()
    (line,) = [text for text in lines if "KV Transfer metrics" in text]
    for part in shown:
        assert part in line
    assert absent not in line
    (window,) = parse_kv_windows(line)
    assert isinstance(window, KvWindow)
    assert (window.connector, window.successful, window.failed) == (connector, 2, 3)
    (load,) = [text for text in lines if "Engine 000" in text]
    assert "Running: 1 reqs, Waiting: 2 reqs, GPU KV cache usage: 50.0%" in load
    windows.tick()
    assert sum("KV Transfer metrics" in text for text in lines) == 1, "only windows with transfers are logged"


def test_a_connector_that_counts_nothing_logs_no_window(tmp_path: Path) -> None:
    lines: list[str] = []
    engine = engine_with("example", lines, "--shared-storage-path", str(tmp_path))
    windows = Windows(engine.log, engine.metrics, lambda: (0, 0, 0.0), engine.connector)
    windows.transfers = [Transfer(0.008, 0.002, 32 * MIB, 4)]
    windows.tick()
    assert not [text for text in lines if "KV Transfer metrics" in text]


def test_access_lines_are_those_of_uvicorn() -> None:
    lines: list[str] = []
    Log(lines.append).access("127.0.0.1:5", "POST", "/v1/completions", "1.1", 200)
    assert lines == ['INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK\n']
