"""Processes made after public bug reports: a router that is healthy too early, an engine that outlives its parent."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_pdperf.stack import procfs
from pytest_pdperf.stack.launch import launch
from pytest_pdperf.stack.logs import read_lines
from pytest_pdperf.stack.ports import PortRegistry
from tests.field_cases import FieldCase, field_case
from tests.integration.stack.stack_fakes import FakeRouter, plan, topology
from tests.integration.stack.test_stack_processes import (
    Start,
    engine,
    exit_of,
    listening,
    pid_of,
    port,
    run_id,
    start,
    stat_of,
    until,
)
from tests.unit.stack.test_stack_field_cases import readiness

__all__ = ["port", "run_id", "start"]  # fixtures


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[PortRegistry]:
    registry = PortRegistry(tmp_path / "ports")
    yield registry
    assert registry.held() == ()


@field_case("045")
def test_045_ready_is_what_answered_a_real_request(
    case: FieldCase, tmp_path: Path, ports: PortRegistry
) -> None:
    answers = [
        {"http": poll["health"]} if poll["health"] != 200 else readiness("vllm-router", poll)
        for poll in case.given["polls"]
    ]
    router = {"env": {"FAKE_READINESS": json.dumps(answers)}}
    want = case.given["want"]
    name = f"launch-{tmp_path.name}"
    planned = plan(
        topology(prefill=want["prefill"], decode=want["decode"], router=router),
        tmp_path,
        ports,
        run_id=name,
        router=FakeRouter(),
    )
    with launch(planned, progress=lambda text: None, deadline_s=60.0) as stack:
        lines = read_lines(stack.logs["router"])
    polls = [i for i, line in enumerate(lines) if line.startswith("readiness")]
    assert len(polls) == len(answers), "asked until every worker of every role was counted, and not again"
    assert lines.index("POST") > polls[-1], "no request before, and none is ready without one"
    assert procfs.marked(name) == []


@field_case("050")
def test_050_a_killed_parent_leaves_no_engine(case: FieldCase, start: Start, port: int, run_id: str) -> None:
    """The grandchild has a session and a port of its own and ignores SIGTERM, as an engine core may."""
    assert case.given["events"] == ["start", "SIGKILL direct child", "stop()"]
    process = engine(start, port + 1, SETSID_PORT=str(port), IGNORE_TERM="1")
    until(lambda: listening(port), "the grandchild listens")
    procfs.send(stat_of(pid_of(process)).proc, signal.SIGKILL)
    assert exit_of(process).code == -signal.SIGKILL
    left = process.stop(0.5)
    assert len(left) == case.want["after_stop"]["survivors"]
    assert (procfs.marked(run_id) == []) == case.want["after_stop"]["waited_for_exit"]
    assert not listening(port)
