"""Bring-up, held to public bug reports: every input of a kind, with the answer that it must get."""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest

from pytest_pdperf.engines.base import Instance
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.probing import parts_at_a_tie
from pytest_pdperf.routers.base import Router, RouterInstance
from pytest_pdperf.routers.registry import get_router
from pytest_pdperf.spec.topology import Kind, Role, RouterSpec
from pytest_pdperf.stack import greedy, pairs
from pytest_pdperf.stack.greedy import Answer
from pytest_pdperf.stack.plan import LaunchPlan
from pytest_pdperf.stack.ports import PortRegistry
from pytest_pdperf.stack.rooms import LIMIT, Rooms
from pytest_pdperf.stack.running import Serving
from tests.field_cases import FieldCase, field_case
from tests.unit.stack.test_stack_greedy import body
from tests.unit.stack.test_stack_plan import make, topology


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[PortRegistry]:
    registry = PortRegistry(tmp_path / "ports")
    yield registry
    registry.close()


def readiness(name: str, poll: dict[str, Any]) -> dict[str, object]:
    """What a router's readiness page says of the workers of a poll."""
    workers = poll["workers"]
    healthy = [w for w in workers if w["ready"]]
    if name != "vllm-router":
        return {"status": "ready", "healthy_workers": len(healthy), "total_workers": len(workers)}
    return {
        "status": "ready",
        **{
            role: {
                "healthy": sum(w["role"] == role for w in healthy),
                "total": sum(w["role"] == role for w in workers),
            }
            for role in ("prefill", "decode")
        },
    }


def instance_of(router: Router, want: dict[str, int]) -> RouterInstance:
    workers = [SimpleNamespace(role=Role(role)) for role, count in want.items() for _ in range(count)]
    return RouterInstance(RouterSpec(), Kind.PD, 1, 2, cast(list[Instance], workers), None)


@field_case("045")
@pytest.mark.parametrize("name", ["vllm-router", "sglang-router", "smg"])
def test_045_every_worker_of_every_role_before_a_request(case: FieldCase, name: str) -> None:
    """Health is never asked; once all are counted the real request decides (`test_stack_field_cases_launched`)."""
    router = get_router(name)
    instance = instance_of(router, case.given["want"])
    counted = [
        poll["t"]
        for poll in case.given["polls"]
        if poll["health"] == 200 and router.sees_all_workers(instance, readiness(name, poll))
    ]
    assert counted == [case.given["polls"][-1]["t"]], "no request is sent before"
    assert set(counted) <= set(case.want["not_ready_at"]), "and counted workers are not enough"
    assert "health" not in router.ready_path(instance).removeprefix("/").split("/")


@field_case("046")
def test_046_no_two_live_requests_share_a_room(case: FieldCase) -> None:
    assert case.want["range"].replace("2**63", str(LIMIT)) == f"0 <= room < {LIMIT}"
    needs = {int(key[1:-6]): value for key, value in case.want.items() if re.fullmatch(r"n\d+_needs", key)}
    for samples in case.given["n"]:
        rooms = Rooms()
        live, taken = [], []
        for _request_id in case.given["ids"][: case.given["concurrent"]]:
            random.seed(42)
            np.random.seed(42)
            live.append(rooms.live(samples))
            taken.append(live[-1].__enter__())
        every = [room for one in taken for room in one]
        assert (len(set(every)) == len(every)) == case.want["rooms_unique_while_live"]
        assert all(len(one) == needs.get(samples, samples) for one in taken)
        assert all(0 <= room < LIMIT for room in every)
        for one in live:
            one.__exit__(None, None, None)


def test_a_room_is_free_again_once_its_request_has_ended_and_not_before() -> None:
    draws = iter([5, 5, 6, 5, 6, 7])
    rooms = Rooms(lambda: next(draws))
    with rooms.live() as (first,):
        with rooms.live() as (second,):
            assert (first, second) == (5, 6)
        with pytest.raises(RuntimeError), rooms.live(1) as (third,):
            assert third == 6, "5 is drawn again and passed over"
            raise RuntimeError("a request that fails gives its room back too")
    draws = iter([5])
    with rooms.live() as (again,):
        assert again == 5


def test_both_legs_of_a_pair_meet_in_one_room_and_the_next_pair_in_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[dict[str, Any]] = []

    def ask(http: object, url: str, path: str, data: dict[str, Any], **_: object) -> Answer:
        sent.append(dict(data))
        return Answer("r", (1, 2), "x", 2, "", None)

    monkeypatch.setattr(pairs, "ask", ask)
    leg = cast(
        Instance, SimpleNamespace(host="127.0.0.1", url="http://x", ports=SimpleNamespace(bootstrap=9))
    )
    planned = cast(LaunchPlan, SimpleNamespace(served_model="m"))
    for _ in range(2):
        random.seed(1)
        pairs.meet_in_a_room(planned, leg, leg, [1, 2], 2, cast(httpx.Client, None), timeout_s=1.0)
    rooms = [data["bootstrap_room"] for data in sent]
    assert rooms[0] == rooms[1] != rooms[2] == rooms[3]


@field_case("047")
def test_047_right_status_wrong_text(
    case: FieldCase, ports: PortRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that parts where two tokens are as likely is noise; damaged KV picks one that is not likely at all."""
    probe = case.given["probe"]
    reference, late = probe["reference"], probe["pd_late_divergence"]
    place = next(i for i, (a, b) in enumerate(zip(reference, late, strict=True)) if a != b)
    assert f"first {place} equal" in case.want["pd_late_divergence"]
    asked: list[Any] = []

    def respond(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        listed = {f"token_id:{reference[place]}": -0.70, f"token_id:{late[place]}": -0.72}
        return body({"choices": [{"logprobs": {"top_logprobs": [listed]}}]})(request)

    monkeypatch.setattr(greedy, "client", lambda: httpx.Client(transport=httpx.MockTransport(respond)))
    stack = cast(Serving, SimpleNamespace(url="http://x", model="m"))
    assert (probe["pd_ok"] == reference) == (case.want["pd_ok"] == "pass")
    assert parts_at_a_tie(stack, 4, reference, late, 0.1)
    assert not parts_at_a_tie(stack, 4, reference, late, 0.0), "nobody forgives what was not allowed"
    assert not parts_at_a_tie(stack, 4, reference, probe["pd_corrupt"], 0.1)
    assert reference[0] != probe["pd_corrupt"][0] and "token 0" in case.want["pd_corrupt"]
    roles = {
        role: {"tensor_parallel": config.pop("tp"), "args": dict(config)}
        for role, config in ((r, dict(c)) for r, c in case.given["configs"].items())
    }
    sizes = {f"{role}-0": tuple(map(str, range(spec["tensor_parallel"]))) for role, spec in roles.items()}
    plan = make(ports, topology(roles=roles), placement=sizes)
    key = case.want["config_check"].rpartition(": ")[2].removesuffix(" differs")
    assert [line for line in plan.warnings if line.startswith(f"{key} differs between the roles")]
    plan.release()


@field_case("053")
def test_053_hidden_ports_never_meet(case: FieldCase, tmp_path: Path) -> None:
    """The planner is given the very ports of the report to choose from, and a program sits on one of them."""
    engines = {row["name"]: row for row in case.given["engines"]}
    sides = {
        name: range(row["side"], row["side"] + row["tp"]) for name, row in engines.items() if "side" in row
    }
    p0, d0 = sides["p0"], sides["d0"]
    said = f"p0.side {p0[0]}-{p0[-1]} overlaps d0.side {d0[0]}-{d0[-1]}"
    assert said in case.want["conflicts"] and set(p0) & set(d0), "what the report did by hand"
    (busy,) = case.given["busy"]
    numbers = [row["http"] for row in engines.values()] + [*p0, *d0]
    window = range(min(numbers), max(numbers) + 60)
    registry = PortRegistry(tmp_path / "ports", window=window, start=busy, free=lambda port: port != busy)
    roles = {
        "prefill": {"replicas": 1, "tensor_parallel": engines["p0"]["tp"]},
        "decode": {"replicas": 1, "tensor_parallel": engines["d0"]["tp"]},
    }
    placement = {f"{r}-0": ("0",) * spec["tensor_parallel"] for r, spec in roles.items()}
    plan = make(registry, topology(roles=roles), placement=placement)
    used: list[int] = []
    for one in plan.instances:
        used += [one.ports.http, *range(one.ports.side_channel, one.ports.side_channel + one.tensor_parallel)]
        used += [one.ports.dist_init] + ([one.ports.bootstrap] if one.role is Role.PREFILL else [])
    assert len(used) == len(set(used)) and busy not in used
    assert set(used) <= set(registry.held()) and set(used) <= set(window)
    plan.release()


def test_a_port_that_the_user_asks_for_and_somebody_has_is_named(ports: PortRegistry) -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        with pytest.raises(UsageProblem, match=f"port {port} is in use by"):
            ports.reserve_fixed("d0", port)
