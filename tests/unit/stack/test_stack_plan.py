"""A plan decides everything, holds its ports, and refuses what is known to fail before anything starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_pdperf.engines.base import Command, Instance, Programs
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.routers.vllm_router import VllmRouter
from pytest_pdperf.spec.topology import Role, Topology
from pytest_pdperf.stack.plan import LaunchPlan, check_model, node_cpus, plan_launch
from pytest_pdperf.stack.ports import PortRegistry


class Engine:
    name = "e"
    default_router = "vllm_router"
    simulated = True

    def check(self, programs: Programs, topology: Topology, devices: Sequence[str]) -> None:
        if "broken" in devices:
            raise UsageProblem("broken device")

    def command(self, instance: Instance, programs: Programs) -> Command:
        if instance.args.get("explode"):
            raise UsageProblem("exploded")
        secret = {"HF_TOKEN": "topsecret123"}
        return Command(("serve", instance.model, "--port", str(instance.ports.http), "two words"), secret)

    def stage(self, line: str) -> str | None:
        return None

    def root_cause(self, lines: Sequence[str]) -> str | None:
        return None

    def version(self, programs: Programs) -> str:
        return "1"

    def longest_context(self, model: str) -> int | None:
        return None

    def supported_prompts(self) -> frozenset[str]:
        return frozenset({"token_ids", "generate_ids"})


class RealEngine(Engine):
    simulated = False


class Router(VllmRouter):
    def check(self, programs: Programs) -> None:
        pass


@pytest.fixture
def ports(tmp_path: Path) -> PortRegistry:
    return PortRegistry(tmp_path / "ports", window=range(20000, 20200), free=lambda port: True)


def topology(**changes: object) -> Topology:
    roles = {"prefill": {"replicas": 1, "tensor_parallel": 2}, "decode": {"replicas": 2}}
    base: dict[str, object] = {"name": "t", "kind": "pd", "roles": roles}
    return Topology.model_validate(base | changes)


PLACEMENT = {"prefill-0": ("0", "1"), "decode-0": ("2",), "decode-1": ("3",)}


def make(ports: PortRegistry, top: Topology | None = None, **changes: object) -> LaunchPlan:
    kwargs: dict[str, object] = {
        "placement": PLACEMENT,
        "model": "m",
        "served_model": "served",
        "programs": Programs(()),
        "log_dir": Path("logs"),
        "run_id": "r",
        "ports": ports,
    }
    engine, router = changes.pop("engine", Engine()), changes.pop("router", Router())
    return plan_launch(top or topology(), engine, router, **(kwargs | changes))  # type: ignore[arg-type]


def test_every_process_has_its_own_ports_and_tensor_parallel_ranges_do_not_overlap(
    ports: PortRegistry,
) -> None:
    """Case 053: p0's side channel 5600-5603 and d0's 5601 would collide."""
    roles = {
        "prefill": {"replicas": 2, "tensor_parallel": 4},
        "decode": {"replicas": 2, "tensor_parallel": 4},
    }
    devices = {f"{r}-{i}": ("0",) * 4 for r in ("prefill", "decode") for i in (0, 1)}
    plan = make(ports, topology(roles=roles), placement=devices)
    used: list[int] = []
    for instance in plan.instances:
        p = instance.ports
        used += [p.http, *range(p.side_channel, p.side_channel + 4), p.dist_init]
        used += [p.bootstrap] if instance.role is Role.PREFILL else []
    assert plan.router_instance is not None
    used += [plan.router_instance.port, plan.router_instance.metrics_port]
    assert len(used) == len(set(used))
    assert set(used) <= set(ports.held())
    plan.release()
    assert ports.held() == ()


def test_instances_carry_devices_model_and_environment(ports: PortRegistry) -> None:
    roles = {"prefill": {"tensor_parallel": 2, "env": {"A": "role"}}, "decode": {"replicas": 2}}
    plan = make(ports, topology(env={"A": "topology", "B": "x"}, roles=roles), numa={"prefill-0": 1})
    prefill, decode = plan.of_role(Role.PREFILL)[0], plan.of_role(Role.DECODE)[1]
    assert (prefill.devices, prefill.tensor_parallel, prefill.numa_node) == (("0", "1"), 2, 1)
    assert (decode.id, decode.devices, decode.numa_node) == ("decode-1", ("3",), None)
    assert (prefill.env, decode.env) == ({"A": "role", "B": "x"}, {"A": "topology", "B": "x"})
    assert (prefill.model, prefill.served_model) == ("m", "served")
    assert plan.commands["decode-1"].argv[3] == str(decode.ports.http)


def test_later_arguments_win_in_either_spelling(ports: PortRegistry) -> None:
    roles = {
        "prefill": {"tensor_parallel": 2, "args": {"b": "role", "c": "role", "d-d": "role"}},
        "decode": {"replicas": 2},
    }
    plan = make(
        ports,
        topology(engine_args={"a": "engine", "b": "engine", "d_d": "engine"}, roles=roles),
        extra_args={"c": "line", "e": "line"},
        role_args={"prefill": {"e": "roleline"}},
    )
    assert plan.of_role(Role.PREFILL)[0].args == {
        "a": "engine", "b": "role", "c": "line", "d_d": "role", "e": "roleline",
    }  # fmt: skip
    assert plan.of_role(Role.DECODE)[0].args == {
        "a": "engine", "b": "engine", "c": "line", "d_d": "engine", "e": "line",
    }  # fmt: skip


def test_the_description_says_what_would_run_and_no_secrets(ports: PortRegistry) -> None:
    text = "\n".join(make(ports).describe())
    assert "t: pd, engine e (SIMULATED), model served" in text
    assert "prefill-0 on 0,1: http 20" in text
    assert "serve m --port" in text
    assert "'two words'" in text
    assert "HF_TOKEN=***" in text
    assert "topsecret123" not in text
    assert "router vllm_router: http" in text


def test_urls_and_prompt_forms(ports: PortRegistry) -> None:
    plan = make(ports)
    assert plan.router_instance is not None
    assert plan.url == plan.router_instance.url
    assert plan.prompt_forms() == {"token_ids"}
    alone = Topology.model_validate({"name": "a", "kind": "aggregated", "roles": {"server": {}}})
    single = make(ports, alone, router=None, placement={"server-0": ("0",)})
    assert single.url == single.instances[0].url
    assert single.prompt_forms() == {"token_ids", "generate_ids"}
    assert single.instances[0].ports.side_channel == 0


def test_roles_whose_kv_blocks_look_different_are_warned_about(ports: PortRegistry) -> None:
    """Case 047: another KV type on decode corrupts silently."""
    roles = {
        "prefill": {"tensor_parallel": 2, "args": {"block_size": 64}},
        "decode": {"replicas": 2, "args": {"kv_cache_dtype": "fp8_e4m3", "block_size": 64}},
    }
    plan = make(ports, topology(roles=roles))
    assert len(plan.warnings) == 1
    assert "kv_cache_dtype differs between the roles (prefill default, decode fp8_e4m3)" in plan.warnings[0]
    assert any("warning: kv_cache_dtype" in line for line in plan.describe())
    assert make(ports).warnings == ()


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"router": None}, "3 engines need a router"),
        ({"role_args": {"server": {"a": 1}}}, "arguments for role 'server', which it lacks"),
        ({"placement": {"prefill-0": ("broken",)}}, "broken device"),
        ({"extra_args": {"explode": True}}, "exploded"),
        ({"engine": RealEngine(), "model": "/nonexistent/model"}, "/nonexistent/model: no such file"),
    ],
)
def test_what_is_refused_keeps_no_port(ports: PortRegistry, changes: dict[str, object], want: str) -> None:
    with pytest.raises(UsageProblem, match=want):
        make(ports, None, **changes)
    assert ports.held() == ()


def test_a_placement_of_the_wrong_size_is_refused(ports: PortRegistry, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    placement = PLACEMENT | {"prefill-0": ("0",)}
    with pytest.raises(UsageProblem, match=r"prefill-0 needs 2 device\(s\), placement gives 1: 0"):
        make(ports, engine=RealEngine(), model=str(tmp_path), placement=placement)
    assert ports.held() == ()


def test_models_are_checked_before_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    for missing in ("/no/such/model", "./model", "a/b/c"):
        with pytest.raises(UsageProblem, match="no such file or directory"):
            check_model(missing)
    with pytest.raises(UsageProblem, match="hf download Qwen/Qwen3-8B"):
        check_model("Qwen/Qwen3-8B")
    (tmp_path / "hf" / "hub" / "models--Qwen--Qwen3-8B").mkdir(parents=True)
    check_model("Qwen/Qwen3-8B")
    with pytest.raises(UsageProblem, match=r"no config\.json"):
        check_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))


def test_a_relaunch_keeps_the_logs_of_the_one_that_died(ports: PortRegistry, tmp_path: Path) -> None:
    folders = []
    for _ in range(3):
        plan = make(ports, log_dir=tmp_path / "logs")
        folders.append(plan.log("decode-0").parent)
        folders[-1].mkdir(parents=True)
        plan.log("decode-0").write_text("why it died")
        plan.release()
    assert len(set(folders)) == 3
    assert folders[0] == tmp_path / "logs"


def test_cpus_of_a_node_are_those_we_may_use(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    (tmp_path / "node3").mkdir()
    (tmp_path / "node3" / "cpulist").write_text(f"{mine[0]}-{mine[0]},100000-100003\n")
    assert node_cpus(3, tmp_path) == (mine[0],)
    assert node_cpus(4, tmp_path) == ()
    assert node_cpus(None, tmp_path) == ()
