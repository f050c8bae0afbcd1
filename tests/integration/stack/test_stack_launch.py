"""A launch is ready only when it is, fails fast and with the reason when it is not, and leaves nothing either way."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pytest_pdperf.engines.registry import get_engine
from pytest_pdperf.errors import BringUpError, RoleDied, UsageProblem
from pytest_pdperf.spec.topology import KvTransfer, Topology
from pytest_pdperf.stack import procfs
from pytest_pdperf.stack.greedy import ProbeError, probe
from pytest_pdperf.stack.launch import Stack, launch
from pytest_pdperf.stack.logs import read_lines
from pytest_pdperf.stack.plan import LaunchPlan, plan_launch
from pytest_pdperf.stack.ports import PortRegistry
from tests.integration.stack.stack_fakes import PROGRAMS, FakeRouter, plan, topology

DEADLINE_S = 60.0
needs_router = pytest.mark.skipif(
    not (Path(sys.executable).parent / "vllm-router").exists(), reason="needs vllm-router (extra `routers`)"
)
READY: dict[str, object] = {"prefill": {"healthy": 1, "total": 1}, "decode": {"healthy": 1, "total": 1}}


class House:
    """A port registry and a run id; notes what the launches print."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = PortRegistry(folder / "ports")
        self.run_id = f"launch-{folder.name}"
        self.progress: list[str] = []

    def plan(self, top: Topology, *, fake_router: bool = False) -> LaunchPlan:
        router = FakeRouter() if fake_router else None
        return plan(top, self.folder, self.ports, run_id=self.run_id, router=router)

    def launch(self, planned: LaunchPlan, **limits: float) -> Stack:
        limits.setdefault("deadline_s", DEADLINE_S)
        return launch(planned, progress=self.progress.append, **limits)  # type: ignore[arg-type]

    def fails(self, planned: LaunchPlan, **limits: float) -> BringUpError:
        with pytest.raises(BringUpError) as caught:
            self.launch(planned, **limits)
        assert procfs.marked(self.run_id) == [], "a failed launch ends what it started"
        assert self.ports.held() == ()
        return caught.value


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    assert procfs.marked(house.run_id) == []
    assert house.ports.held() == ()


def fake_router(answers: list[dict[str, object]], **env: str) -> dict[str, object]:
    return {"env": {"FAKE_READINESS": json.dumps(answers), **env}}


@needs_router
def test_a_pd_stack_comes_up_behind_the_real_router_and_goes_down(house: House) -> None:
    with house.launch(house.plan(topology(prefill=1, decode=2))) as stack:
        stack.check()
        assert set(stack.role_urls) == {"prefill-0", "decode-0", "decode-1"}
        assert set(stack.warmth.through_router) == {("prefill-0", "decode-0"), ("prefill-0", "decode-1")}
        assert stack.warmth.direct == ()
        assert stack.notes == ()
        assert set(stack.startup_s) == {"engines", "router", "pairs", "total"}
        assert set(stack.pids) == {"prefill-0", "decode-0", "decode-1", "router"}
        tokens = probe(stack.url, stack.model, [1, 2, 3], 4)
        assert len(tokens) == 4
        assert tokens == probe(stack.role_urls["decode-0"], stack.model, [1, 2, 3], 4)
        assert stack.router_metrics_url is not None
        assert "vllm_router" in httpx.get(stack.router_metrics_url).text
        ports = house.ports.held()
        assert stack.plan.instances[0].ports.http in ports
    assert stack.leftovers == ()
    assert stack.close() == ()
    assert any("loading weights" in line for line in house.progress)


@needs_router
def test_pairs_that_the_router_never_forms_are_warmed_directly(house: House) -> None:
    """Round robin over 2 x 2 moves both counters in step: p0 never meets d1."""
    with house.launch(house.plan(topology(prefill=2, decode=2))) as stack:
        seen = set(stack.warmth.through_router) | set(stack.warmth.direct)
        assert seen == {(f"prefill-{p}", f"decode-{d}") for p in (0, 1) for d in (0, 1)}
        assert set(stack.warmth.direct) == {("prefill-0", "decode-1"), ("prefill-1", "decode-0")}
        assert "never paired prefill-0>decode-1" in stack.notes[0]
        legs = [
            line for line in read_lines(stack.logs["decode-1"]) if '"remote_engine_id": "prefill-0"' in line
        ]
        assert legs, "decode-1 was told to pull from prefill-0"


@needs_router
def test_aggregated_servers_are_all_warmed(house: House) -> None:
    with house.launch(house.plan(topology(servers=2))) as stack:
        for id in ("server-0", "server-1"):
            posts = [line for line in read_lines(stack.logs[id]) if line.startswith("POST /v1/completions")]
            assert len(posts) >= 2, "one directly, one through the router"


@needs_router
def test_a_role_that_dies_is_named_with_its_reason(house: House) -> None:
    with house.launch(house.plan(topology())) as stack:
        proc = procfs.read_stat(stack.pids["decode-0"])
        assert proc is not None
        procfs.send(proc.proc, signal.SIGKILL)
        with pytest.raises(RoleDied) as caught:
            for _ in range(200):
                stack.check()
                time.sleep(0.05)
        assert caught.value.instance == "decode-0"
        assert "SIGKILL" in caught.value.reason
        assert "Starting vLLM server" in caught.value.detail


def test_a_death_in_start_up_fails_at_once_with_cause_and_log(house: House) -> None:
    top = topology(env={"decode": {"FAKE_DIE": "3"}, "prefill": {"FAKE_NEVER_READY": "1"}})
    began = time.monotonic()
    error = house.fails(house.plan(top))
    assert time.monotonic() - began < DEADLINE_S / 2, "not at the deadline"
    assert "decode-0" in error.reason
    assert "exit code 3: ValueError: max_model_len 999 is too large" in error.reason
    assert "stage 'loading weights'" in error.reason
    assert "Traceback" in error.detail


def test_a_kill_in_start_up_is_told_as_such(house: House) -> None:
    error = house.fails(house.plan(topology(env={"prefill": {"FAKE_SELF_KILL": "1"}})))
    assert "prefill-0" in error.reason
    assert "killed by SIGKILL" in error.reason


def test_the_deadline_names_who_is_late_and_in_which_stage(house: House) -> None:
    planned = house.plan(topology(env={"decode": {"FAKE_NEVER_READY": "1"}}))
    error = house.fails(planned, deadline_s=3.0)
    assert error.reason.startswith("decode-0: not ready")
    assert "stage 'loading weights'" in error.reason
    assert "prefill-0" not in error.reason


def test_a_silent_engine_is_late_in_its_first_stage(house: House) -> None:
    planned = house.plan(topology(env={"decode": {"FAKE_NEVER_READY": "1", "FAKE_QUIET": "1"}}))
    assert "decode-0 in stage 'starting'" in house.fails(planned, deadline_s=2.0).reason


def test_health_without_the_model_is_not_ready(house: House) -> None:
    planned = house.plan(topology(env={"decode": {"FAKE_WRONG_MODEL": "1"}}))
    error = house.fails(planned, deadline_s=3.0)
    assert "serves ['another'] instead of 'm'" in error.reason


def test_a_taken_port_fails_although_the_engine_is_healthy(house: House) -> None:
    said = "(EngineCore pid=1) ERROR zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:5600')"
    error = house.fails(house.plan(topology(env={"prefill": {"FAKE_SAY": said}})))
    assert "prefill-0: a port was taken" in error.reason
    assert "5600" in error.reason


def test_who_took_the_port_is_named(house: House) -> None:
    planned = house.plan(topology())
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", planned.instances[1].ports.http))
        thief.listen()
        error = house.fails(planned)
    assert error.reason.startswith("decode-0: a port was taken: OSError: [Errno 98] Address already in use")
    assert f"http port {planned.instances[1].ports.http} is held by pid {os.getpid()} (" in error.reason


@pytest.mark.parametrize(("engine", "connector"), [("sim", "mooncake"), ("sim-sglang", "nixl")])
def test_a_stale_bootstrap_server_is_told_by_its_port(engine: str, connector: str, house: House) -> None:
    """It took the port between the plan and the start: before that the port would not have been chosen."""
    top = topology()
    kv = KvTransfer.model_validate({"connector": connector})
    planned = plan_launch(
        top.model_copy(update={"kv_transfer": kv}),
        get_engine(engine),
        FakeRouter(),
        placement={},
        model="fast",
        served_model="m",
        programs=PROGRAMS,
        log_dir=house.folder / "stale",
        run_id=house.run_id,
        ports=house.ports,
    )
    with socket.socket() as stale:
        stale.bind(("127.0.0.1", planned.instances[0].ports.bootstrap))
        stale.listen()
        error = house.fails(planned)
    port = planned.instances[0].ports.bootstrap
    assert error.reason.startswith("prefill-0")
    assert "address already in use" in error.reason
    assert f"bootstrap port {port} is held by pid {os.getpid()} (" in error.reason


def test_a_missing_program_is_named(house: House) -> None:
    planned = house.plan(topology())
    commands = dict(planned.commands)
    commands["decode-0"] = type(commands["decode-0"])(("/nonexistent/vllm", "serve"))
    object.__setattr__(planned, "commands", commands)
    assert "/nonexistent/vllm" in house.fails(planned).reason


def test_a_router_that_is_healthy_too_early_is_waited_for(house: House) -> None:
    """Case 045: /health says 200 from the first moment; ready is every worker of every role."""
    answers: list[dict[str, object]] = [
        {"http": 503, "status": "not ready"},
        {"status": "ready", "prefill": {"healthy": 0, "total": 0}, "decode": {"healthy": 1, "total": 1}},
        {"status": "ready", "prefill": {"healthy": 0, "total": 1}, "decode": {"healthy": 1, "total": 1}},
        {"status": "ready", **READY},
    ]
    planned = house.plan(topology(router=fake_router(answers)), fake_router=True)
    with house.launch(planned) as stack:
        lines = read_lines(stack.logs["router"])
        polls = [i for i, line in enumerate(lines) if line.startswith("readiness")]
        assert len(polls) == 4
        assert lines.index("POST") > polls[-1], "no request before every worker is there"


def test_a_router_that_sees_fewer_workers_is_never_ready(house: House) -> None:
    planned = house.plan(topology(decode=2, router=fake_router([READY])), fake_router=True)
    error = house.fails(planned, router_deadline_s=2.0)
    assert error.reason.startswith("router: not ready")
    assert '"decode": {"healthy": 1, "total": 1}' in error.reason


def test_readiness_without_a_working_request_is_not_ready(house: House) -> None:
    planned = house.plan(topology(router=fake_router([READY], FAKE_REFUSE="1")), fake_router=True)
    error = house.fails(planned)
    assert "first requests through the router: HTTP 500" in error.reason
    assert "no worker" in error.reason


def test_a_router_that_names_no_pairs_still_gets_every_pair_warmed(house: House) -> None:
    planned = house.plan(topology(router=fake_router([READY])), fake_router=True)
    with house.launch(planned) as stack:
        assert stack.warmth.through_router == ()
        assert stack.warmth.direct == (("prefill-0", "decode-0"),)


@needs_router
def test_an_error_inside_a_200_is_not_ready(house: House) -> None:
    error = house.fails(house.plan(topology(env={"decode": {"FAKE_ERROR_IN_STREAM": "1"}})))
    assert "error in the answer" in error.reason


@needs_router
def test_a_death_during_the_first_request_is_told_instead_of_the_http_error(house: House) -> None:
    error = house.fails(house.plan(topology(env={"prefill": {"FAKE_DIE_ON_REQUEST": "1"}})))
    assert "prefill-0 ended" in error.reason
    assert "exit code 7: RuntimeError: the fake engine was told to die" in error.reason


@needs_router
def test_a_first_request_that_hangs_has_a_deadline_of_its_own(house: House) -> None:
    planned = house.plan(topology(env={"decode": {"FAKE_HANG_ON_REQUEST": "1"}}))
    error = house.fails(planned, request_deadline_s=2.0)
    assert error.reason.startswith("first requests through the router: no answer")


@needs_router
def test_a_first_answer_that_drips_for_ever_has_the_same_deadline(house: House) -> None:
    """Each read is quick, so only the whole can be late."""
    planned = house.plan(topology(env={"decode": {"FAKE_DRIP": "1"}}))
    error = house.fails(planned, request_deadline_s=2.0)
    assert error.reason.startswith("first requests through the router: no answer within")


@needs_router
def test_a_dead_router_is_told(house: House) -> None:
    """Its metrics port is taken between the plan and the start: it exits with code 1."""
    planned = house.plan(topology())
    assert planned.router_instance is not None
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", planned.router_instance.metrics_port))
        thief.listen()
        error = house.fails(planned)
    assert error.reason.startswith("router ended")
    assert "exit code 1" in error.reason


def test_a_fixed_router_port_in_use_is_a_usage_error_that_names_the_owner(house: House) -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        with pytest.raises(UsageProblem, match=rf"port {port} is in use by pid {os.getpid()} \("):
            house.plan(topology(router={"port": port}))
    assert house.ports.held() == ()


def test_a_probe_that_fails_says_why(house: House) -> None:
    port = house.ports.reserve("nobody").first
    with pytest.raises(ProbeError, match="ConnectError"):
        probe(f"http://127.0.0.1:{port}", "m", [1], 1, timeout_s=2.0)
    house.ports.close()
