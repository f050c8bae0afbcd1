"""Whatever goes wrong from plan to tear-down ends in one line that says what, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_pdperf.engines.base import Command
from pytest_pdperf.errors import BringUpError, RoleDied, UsageProblem
from pytest_pdperf.gpus.busy import check_idle
from pytest_pdperf.gpus.grammar import Device, parse_gpus, resolve
from pytest_pdperf.gpus.inventory import Inventory, load_recorded
from pytest_pdperf.gpus.lease import acquire
from pytest_pdperf.gpus.placement import place
from pytest_pdperf.spec.topology import Topology
from pytest_pdperf.stack import procfs
from pytest_pdperf.stack.hangs import HangWatch
from pytest_pdperf.stack.launch import Stack
from pytest_pdperf.stack.plan import LaunchPlan, check_model
from pytest_pdperf.stack.ports import PortRegistry
from tests.integration.fault_house import DEADLINE_S, READY, Fault, House, routed, server
from tests.integration.stack.stack_fakes import FakeRouter, plan, topology

INVENTORIES = Path(__file__).parents[1] / "data" / "inventories"


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    house = House(tmp_path)
    monkeypatch.setenv("TMPDIR", str(house.tmp))
    before = {s.proc for s in procfs.descendants(os.getpid())}
    files = len(list(Path("/proc/self/fd").iterdir()))
    yield house
    house.nothing_is_left()
    left = [s for s in procfs.descendants(os.getpid()) if s.proc not in before]
    assert left == [], "children, whether or not they carry the marker"
    assert len(list(Path("/proc/self/fd").iterdir())) <= files


def _other_command(command: Command) -> Callable[[LaunchPlan, ExitStack], None]:
    def prepare(planned: LaunchPlan, exits: ExitStack) -> None:
        object.__setattr__(planned, "commands", {**planned.commands, "server-0": command})

    return prepare


def _not_executable(planned: LaunchPlan, exits: ExitStack) -> None:
    file = planned.log_dir.parent / "program"
    file.write_text("#!/bin/sh\n")
    _other_command(Command((str(file),)))(planned, exits)


def _log_folder_is_a_file(planned: LaunchPlan, exits: ExitStack) -> None:
    planned.log_dir.write_text("")


def _thief(planned: LaunchPlan, exits: ExitStack) -> None:
    taken = exits.enter_context(socket.socket())
    taken.bind(("127.0.0.1", planned.instances[0].ports.http))
    taken.listen()


SECRET = "hf_" + "a" * 30
IN_USE = "ERROR zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:5600')"

BRING_UP = {
    # the process itself
    "no such program": replace(
        server("server-0 ended .*cannot start /nonexistent/vllm: .*No such file"),
        prepare=_other_command(Command(("/nonexistent/vllm", "serve"))),
    ),
    "program not executable": replace(server("cannot start .*Permission denied"), prepare=_not_executable),
    "no such folder to run in": replace(
        server("cannot start .*No such file"),
        prepare=_other_command(Command(("/bin/sleep", "60"), cwd=Path("/nonexistent"))),
    ),
    "log folder is a file": replace(
        server("server-0 could not be started: .*(exists|Not a directory)"), prepare=_log_folder_is_a_file
    ),
    # the engine's start
    "exit code 1 without a word": server(
        "server-0 ended .*stage 'starting': exit code 1$", QUIET="1", EXIT="1"
    ),
    "exit code 2": server("server-0 ended .*stage 'loading weights': exit code 2$", EXIT="2"),
    "traceback": server("exit code 3: ValueError: max_model_len 999 is too large$", DIE="3"),
    "SIGKILL": server(r"killed by SIGKILL \(no kernel OOM kill was counted: somebody sent it\)$", SIGNAL="9"),
    "SIGSEGV": server("killed by SIGSEGV$", SIGNAL="11"),
    "SIGABRT": server("killed by SIGABRT$", SIGNAL="6"),
    "SIGTERM": server("killed by SIGTERM$", SIGNAL="15"),
    "cause in the log, then a signal": server(
        "killed by SIGBUS: CudaError: out of memory$", SAY="CudaError: out of memory", SIGNAL="7"
    ),
    "garbage in the log": server("exit code 4$", BYTES="1", EXIT="4"),
    "secret in the cause": server(
        r"exit code 5: SomeError: token \*\*\*$", SAY=f"SomeError: token {SECRET}", EXIT="5"
    ),
    "hidden child": server("exit code 6$", DOUBLE_FORK="1", EXIT="6"),
    "nameless child": server("exit code 6$", NAMELESS_CHILD="1", EXIT="6"),
    "port taken by a log line": server("server-0: a port was taken: .*5600", SAY=IN_USE),
    "port taken": replace(server(r"server-0: a port was taken: OSError.*held by pid \d+ \("), prepare=_thief),
    "silent": replace(
        server("server-0: not ready .*in stage 'starting' for", QUIET="1", NEVER_READY="1"),
        limits={"deadline_s": 0.6},
    ),
    "hangs while loading": server(
        "not ready .*in stage 'loading weights' for", NEVER_READY="1", late="server-0: loading weights"
    ),
    "one stage takes too long": replace(
        server(r"server-0: in stage 'loading weights' for [\d.]+ s, which may take 0.3 s", NEVER_READY="1"),
        stage_seconds={"loading weights": 0.3 * 900 / DEADLINE_S},
    ),
    "stops itself": server(
        "not ready .*in stage 'loading weights'", SIGNAL="19", late="server-0: loading weights"
    ),
    "floods its log": server(
        "not ready .*in stage 'loading weights'",
        PRINT_FOREVER="1",
        NEVER_READY="1",
        late="server-0: loading weights",
    ),
    "never healthy": server("not ready .*in stage 'serving'", HEALTH="503", late="server-0: serving"),
    "healthy for nobody": server("not ready .*in stage 'serving'", DEAF="1", late="server-0: serving"),
    "another model": server(
        r"not ready .*serves \['another'\] instead of 'm'", WRONG_MODEL="1", late="server-0: healthy, but"
    ),
    "no model": server(r"serves \[\] instead of 'm'", MODELS='{"data": []}', late="server-0: healthy, but"),
    "models that are no JSON": server(
        "not ready .*in stage 'serving'", MODELS="<html>", late="server-0: serving"
    ),
    "models of another shape": server(
        "not ready .*in stage 'serving'", MODELS='["m"]', late="server-0: serving"
    ),
    "one of two dies": Fault(
        "decode-0 ended .*exit code 3: ValueError",
        {"decode": {"FAKE_DIE": "3"}, "prefill": {"FAKE_NEVER_READY": "1"}},
        readiness=[READY],
        kind="pd",
    ),
    "one of two is late": Fault(
        "decode-0: not ready",
        {"decode": {"FAKE_NEVER_READY": "1"}},
        late="prefill-0: healthy",
        readiness=[READY],
        kind="pd",
    ),
    # the router
    "router ends": routed("router ended .*exit code 2: error: no such policy$", {"end": 2}),
    "router never ready": routed(
        "router: not ready .*last readiness answer: HTTP 503", {"http": 503}, late="readiness"
    ),
    "router without workers": routed(
        'router: not ready .*"healthy_workers": 0', READY | {"healthy_workers": 0}, late="readiness"
    ),
    "router talks nonsense": routed(
        "router: not ready .*last readiness answer", {"raw": "<html>"}, late="readiness"
    ),
    "engine dies while the router waits": replace(
        routed("server-0 ended .*stage 'healthy': exit code 9$", {"http": 503}),
        env={"server": {"FAKE_DIE_AFTER_MODELS": "0.3"}},
    ),
    # the first request
    "refused": server("first request to server-0: HTTP 429 .*no room left$", REFUSE="429"),
    "dies on it": server("server-0 ended .*exit code 7: RuntimeError: the fake engine", DIE_ON_REQUEST="1"),
    "error in a 200": server("error in the answer: .*Internal server error", ERROR_IN_STREAM="1"),
    "cut short": server("first request to server-0: .*RemoteProtocolError", CUT="1"),
    "too few tokens": server("first request to server-0: 1 tokens came instead of 2$", SHORT="1"),
    "hangs": replace(
        server("first request to server-0: no answer", HANG_ON_REQUEST="1"),
        limits={"request_deadline_s": 0.7},
    ),
    "drips": replace(
        server("first request to server-0: no answer", DRIP="1"), limits={"request_deadline_s": 0.7}
    ),
}


@pytest.mark.parametrize("name", BRING_UP)
def test_a_bring_up_that_fails(house: House, name: str) -> None:
    fault = BRING_UP[name]
    with pytest.raises(BringUpError) as caught:
        house.launch(fault)
    reason = caught.value.reason
    assert re.search(fault.reason, reason), reason
    assert "\n" not in reason
    assert len(reason) < 900
    assert SECRET not in str(caught.value)


# -- after the stack has come up ---------------------------------------------------------------------------


def send(stack: Stack, id: str, signum: signal.Signals) -> None:
    stat = procfs.read_stat(stack.pids[id])
    assert stat is not None
    assert procfs.send(stat.proc, signum)


def kill_reaper(stack: Stack, id: str) -> None:
    child = procfs.read_stat(stack.pids[id])
    assert child is not None
    reaper = procfs.read_stat(child.ppid)
    assert reaper is not None
    assert procfs.send(reaper.proc, signal.SIGKILL)


IN_CELL: Mapping[str, tuple[str, str, Callable[[Stack], None], dict[str, str]]] = {
    "role killed": (
        "server-0",
        "^killed by SIGKILL .*somebody sent it",
        lambda stack: send(stack, "server-0", signal.SIGKILL),
        {},
    ),
    "role ended politely": (
        "server-0",
        "^killed by SIGTERM",
        lambda stack: send(stack, "server-0", signal.SIGTERM),
        {},
    ),
    "role exits by itself": ("server-0", "^exit code 9$", lambda stack: None, {"FAKE_DIE_AFTER_MODELS": "1"}),
    "role stopped": (
        "server-0",
        r"^stopped answering for \d+ s \(no answer to /health .*pid \d+ is stopped by a signal \(SIGSTOP",
        lambda stack: send(stack, "server-0", signal.SIGSTOP),
        {},
    ),
    "role blocked": (
        "server-0",
        r"^stopped answering for \d+ s \(no answer to /health within [\d.]+ s\)$",
        lambda stack: send(stack, "server-0", signal.SIGUSR1),
        {},
    ),
    "router killed": (
        "router",
        "^killed by SIGKILL",
        lambda stack: send(stack, "router", signal.SIGKILL),
        {},
    ),
    "router stopped": (
        "router",
        r"^stopped answering for \d+ s .*pid \d+ is stopped by a signal",
        lambda stack: send(stack, "router", signal.SIGSTOP),
        {},
    ),
    "reaper killed": (
        "server-0",
        "^its reaper was killed from outside$",
        lambda stack: kill_reaper(stack, "server-0"),
        {},
    ),
}


@pytest.mark.parametrize("name", IN_CELL)
def test_a_stack_that_breaks_during_a_cell(house: House, name: str) -> None:
    instance, reason, break_it, env = IN_CELL[name]
    with house.launch(Fault("", {"server": env}, readiness=[READY])) as stack:
        assert stack.hangs is not None
        stack.hangs.stop()
        stack.hangs.join()
        stack.watch_hangs(HangWatch(stack.hangs.urls, period_s=0.05, silence_s=1.0, timeout_s=0.3))
        break_it(stack)
        with pytest.raises(RoleDied) as caught:
            for _ in range(600):
                stack.check()
                time.sleep(0.05)
    assert caught.value.instance == instance
    assert re.search(reason, caught.value.reason), caught.value.reason
    assert "\n" not in caught.value.reason


# -- tear-down ---------------------------------------------------------------------------------------------

TEAR_DOWN: Mapping[str, tuple[Callable[[Stack], None], dict[str, str]]] = {
    "ignores SIGTERM": (lambda stack: None, {"FAKE_IGNORE_TERM": "1"}),
    "is stopped": (lambda stack: send(stack, "server-0", signal.SIGSTOP), {}),
    "is deaf": (lambda stack: send(stack, "server-0", signal.SIGUSR1), {}),
    "is dead already": (lambda stack: send(stack, "server-0", signal.SIGKILL), {}),
    "has lost its reaper": (lambda stack: kill_reaper(stack, "server-0"), {}),
    "left its session": (lambda stack: None, {"FAKE_DOUBLE_FORK": "1"}),
}


@pytest.mark.parametrize("name", TEAR_DOWN)
def test_a_tear_down_of_an_engine_that(house: House, name: str) -> None:
    break_it, env = TEAR_DOWN[name]
    stack = house.launch(Fault("", {"server": env}))
    break_it(stack)
    began = time.monotonic()
    assert stack.close(grace_s=0.3) == ()
    assert time.monotonic() - began < 0.3 + 8.0 + 3.0, "the grace, and what a reaper and the sweep may add"


# -- before anything starts --------------------------------------------------------------------------------


def recorded(name: str) -> Inventory:
    return load_recorded(INVENTORIES / f"{name}.json")


def _port_in_use(house: House) -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        plan(
            topology(router={"port": owner.getsockname()[1], "env": {"FAKE_READINESS": "[]"}}),
            house.folder,
            house.ports,
            run_id=house.run_id,
            router=FakeRouter(),
        )


def _no_ports_left(house: House) -> None:
    few = PortRegistry(house.folder / "few", window=range(20_000, 20_003))
    plan(topology(servers=1), house.folder, few, run_id=house.run_id, alone=True)


def _no_config(house: House) -> None:
    (house.folder / "model").mkdir()
    check_model(str(house.folder / "model"))


def _leased(house: House) -> None:
    device = Device("0", uuid="GPU-aaaa", index=0)
    with acquire([device], folder=house.leases, command="another run"):
        acquire([device], folder=house.leases)


def _busy(house: House) -> None:
    found = recorded("pcie-l40s-4x-busy")
    check_idle(resolve(parse_gpus("all"), found, None), found)


def _too_large(house: House) -> None:
    found = recorded("recorded-h200-2x")
    wide = Topology.model_validate(
        {
            "name": "wide",
            "kind": "pd",
            "roles": {"prefill": {"replicas": 1, "tensor_parallel": 2}, "decode": {"tensor_parallel": 2}},
        }
    )
    place(wide, resolve(parse_gpus("all"), found, None), found)


BEFORE: Mapping[str, tuple[str, Callable[[House], object]]] = {
    "router port in use": (r"port \d+ is in use by pid \d+ \(", _port_in_use),
    "no ports left": ("no .* neighbouring free ports for .* in 20000-20002", _no_ports_left),
    "two engines without a router": (
        "t: 2 engines need a router in front",
        lambda h: plan(topology(), h.folder, h.ports, run_id=h.run_id, alone=True),
    ),
    "no such model": ("model /nowhere/m: no such file or directory", lambda h: check_model("/nowhere/m")),
    "a folder that is no model": ("has no config.json", _no_config),
    "no driver": (
        "--gpus 0: .*use --engine sim",
        lambda h: resolve(parse_gpus("0"), recorded("no-driver"), None),
    ),
    "no such GPU": (
        "--gpus 7: there is no GPU 7; this machine has 2, indices 0-1",
        lambda h: resolve(parse_gpus("7"), recorded("recorded-h200-2x"), None),
    ),
    "GPU leased by another run": (
        r"GPU 0 \(GPU-aaaa\) is in use by process \d+ since .*: another run",
        _leased,
    ),
    "GPU busy": (r"GPU \d is in use by process \d+", _busy),
    "topology too large": ("wide.* needs 4 GPUs.* 2", _too_large),
}


@pytest.mark.parametrize("name", BEFORE)
def test_a_plan_that_cannot_work(house: House, name: str) -> None:
    reason, attempt = BEFORE[name]
    with pytest.raises(UsageProblem, match=reason):
        attempt(house)
    assert house.ports.held() == ()
    assert list(house.leases.glob("*.lock")) == [], "leases"


def test_there_are_at_least_fifty_faults() -> None:
    assert len(BRING_UP) + len(IN_CELL) + len(TEAR_DOWN) + len(BEFORE) >= 50
