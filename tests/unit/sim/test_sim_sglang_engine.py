"""The simulated SGLang as an engine: its command line, what it refuses, and its two generations of metrics."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pytest_pdperf.engines.base import Instance, Ports, Programs
from pytest_pdperf.engines.sim.sglang_engine import ENGINE
from pytest_pdperf.engines.sim.sglang_metrics import Levels, SglangCollector, SglangMetrics, exposition
from pytest_pdperf.engines.sim.sglang_server import SglangLog, main, split_arguments
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.topology import FlagValue, KvTransfer, Role, Topology

NOWHERE = Programs(())


def command(role: Role = Role.PREFILL, args: dict[str, FlagValue] | None = None) -> tuple[str, ...]:
    instance = Instance(
        id=f"{role.value}-0",
        role=role,
        ports=Ports(http=8200, side_channel=5600, bootstrap=8998, dist_init=1),
        devices=(),
        tensor_parallel=2,
        model="fast",
        served_model="m",
        args=args or {},
        env={},
        kv_transfer=None if role is Role.SERVER else KvTransfer(),
    )
    return ENGINE.command(instance, NOWHERE).argv


def value(argv: tuple[str, ...], flag: str) -> str:
    assert argv.count(flag) == 1, f"{flag} in {argv}"
    return argv[argv.index(flag) + 1]


def topology(**changes: object) -> Topology:
    base: dict[str, object] = {"name": "t", "kind": "pd", "roles": {"prefill": {}, "decode": {}}}
    return Topology.model_validate(base | changes)


def test_prefill_listens_on_the_bootstrap_port() -> None:
    argv = command()
    assert argv[1:3] == ("-m", "pytest_pdperf.engines.sim.sglang_server")
    assert value(argv, "--side-channel-port") == "8998"
    assert "--side-channel-port" not in command(Role.DECODE)


def test_sglangs_names_and_the_common_ones_mean_the_same() -> None:
    for args in (
        {"max_model_len": 512, "max_num_seqs": 3},
        {"context_length": 512, "max-running-requests": 3},
    ):
        argv = command(args={**args, "mem_fraction_static": 0.9})
        assert (value(argv, "--max-model-len"), value(argv, "--max-num-seqs")) == ("512", "3")
        assert value(argv, "--ignored") == "gpu_memory_utilization"


def test_its_own_arguments() -> None:
    argv = command(args={"incremental_streaming_output": True, "metrics_form": "old"})
    own, rest = split_arguments(argv[3:])
    assert (own.incremental_streaming_output, own.metrics_form) == (True, "old")
    assert "--role" in rest
    own, _ = split_arguments(command(args={"incremental_streaming_output": False})[3:])
    assert (own.incremental_streaming_output, own.metrics_form) == (False, "new")


def test_recomputing_on_decode_is_not_what_sglang_does() -> None:
    with pytest.raises(UsageProblem, match=r"t': roles.decode.args.faults: .*'recompute'"):
        ENGINE.check(
            NOWHERE, topology(roles={"prefill": {}, "decode": {"args": {"faults": "recompute=1"}}}), ()
        )
    with pytest.raises(UsageProblem, match=r"arguments of decode-0.faults"):
        command(Role.DECODE, {"faults": "recompute=0.5"})
    command(Role.DECODE, {"faults": "transfer_fail=0.5"})


def test_both_connectors_and_no_third_one() -> None:
    for connector in ("nixl", "mooncake"):
        ENGINE.check(NOWHERE, topology(kv_transfer={"connector": connector}), ())
    with pytest.raises(UsageProblem, match="'example' is not simulated; use 'nixl' or 'mooncake'"):
        ENGINE.check(NOWHERE, topology(kv_transfer={"connector": "example"}), ())
    with pytest.raises(UsageProblem, match="unknown fault 'nope'"):
        ENGINE.check(NOWHERE, topology(engine_args={"faults": "nope=1"}), ())


def test_what_its_log_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--role", "prefill", "--port", "1", "--served-model-name", "m"]) == 2
    lines = capsys.readouterr().out.splitlines()
    cause = ENGINE.root_cause(lines)
    assert cause is not None
    assert "role prefill needs --side-channel-port" in cause
    SglangLog().info("Load weight begin. model=fast (simulated)")
    (line,) = capsys.readouterr().out.splitlines()
    assert ENGINE.stage(line) == "loading weights"
    assert ENGINE.root_cause([line]) is None
    SglangLog().access("127.0.0.1:1", "GET", "/health", "1.1", 200)
    assert capsys.readouterr().out.endswith('] INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK\n')


def page(
    metrics: SglangMetrics, role: Role, *, old: bool = False, levels: Levels | None = None
) -> dict[str, float]:
    collector = SglangCollector(
        metrics,
        role=role,
        model_name="m",
        levels=lambda: levels or Levels(0, 0, 0.0),
        total_tokens=1600,
        page_size=16,
        context_len=512,
        old=old,
    )
    families = text_string_to_metric_families(exposition(collector)().decode())
    found: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            kind = "unified" if role is Role.SERVER else role.value
            assert sample.labels.get("engine_type", kind) == kind
            extra = {k: v for k, v in sample.labels.items() if k in ("mode", "stage", "is_streaming")}
            found[sample.name.removeprefix("sglang:") + "".join(f" {v}" for v in extra.values())] = (
                sample.value
            )
    return found


def test_queues_and_kv_in_use() -> None:
    levels = Levels(2, 3, 0.25, bootstrapping=4, inflight=5, preallocating=6, transferring=7)
    found = page(SglangMetrics(), Role.PREFILL, levels=levels)
    assert found["num_running_reqs"] == 2
    assert found["num_queue_reqs"] == 3
    assert found["num_prefill_bootstrap_queue_reqs"] == 4
    assert found["num_prefill_inflight_queue_reqs"] == 5
    assert found["num_decode_prealloc_queue_reqs"] == 6
    assert found["num_decode_transfer_queue_reqs"] == 7
    assert (found["token_usage"], found["num_used_tokens"], found["num_pages"]) == (0.25, 400, 100)
    assert found["fwd_occupancy"] != found["fwd_occupancy"], "NaN, as on an idle engine"
    assert not [name for name in found if name.startswith("kv_transfer")], "printed from the first one on"


def test_what_prefill_sends_in_the_new_and_the_old_form() -> None:
    metrics = SglangMetrics()
    metrics.sent(0.05, 100 << 20)
    metrics.sent(0.10, 300 << 20)
    new = page(metrics, Role.PREFILL)
    assert new["kv_transfer_latency_ms_count"] == 2
    assert new["kv_transfer_latency_ms_sum"] == pytest.approx(150)
    assert new["kv_transfer_total_mb_sum"] == 400
    assert new["kv_transfer_speed_gb_s_sum"] == pytest.approx(100 / 1024 / 0.05 + 300 / 1024 / 0.10)
    old = page(metrics, Role.PREFILL, old=True)
    assert old["kv_transfer_latency_ms"] == pytest.approx(100)
    assert old["kv_transfer_speed_gb_s"] == pytest.approx(300 / 1024 / 0.10)
    assert "kv_transfer_latency_ms_count" not in old


def test_requests_and_tokens_are_counted_by_streaming_and_never_go_down() -> None:
    metrics = SglangMetrics()
    metrics.finish(True, 10, 4)
    metrics.finish(False, 20, 5)
    metrics.finish(True, 30, 6)
    found = page(metrics, Role.DECODE)
    assert (found["num_requests_total true"], found["num_requests_total false"]) == (2, 1)
    assert (found["prompt_tokens_total true"], found["prompt_tokens_total false"]) == (40, 20)
    assert (found["generation_tokens_total true"], found["generation_tokens_total false"]) == (10, 5)


def test_first_tokens_are_timed_where_clients_get_them() -> None:
    metrics = SglangMetrics()
    metrics.time_to_first_token.observe(0.3)
    metrics.stage("prefill_forward", 0.2)
    assert "time_to_first_token_seconds_count" not in page(metrics, Role.PREFILL)
    assert page(metrics, Role.DECODE)["time_to_first_token_seconds_count"] == 1
    assert page(metrics, Role.SERVER)["per_stage_req_latency_seconds_sum prefill_forward"] == pytest.approx(
        0.2
    )
