"""A place for one fault of a stack's life, with everything that may leak watched."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from pytest_pdperf.stack import procfs
from pytest_pdperf.stack.launch import Stack, launch
from pytest_pdperf.stack.plan import LaunchPlan
from pytest_pdperf.stack.ports import PortRegistry, port_state
from tests.integration.stack.stack_fakes import FakeRouter, plan, topology

DEADLINE_S = 60.0
"""Nothing here waits for it: faults that only a deadline ends bring a short one of their own."""


READY: dict[str, object] = {"status": "ready", "healthy_workers": 1, "total_workers": 1}


class House:
    """Where one fault happens, with everything that may leak in places of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tmp = folder / "tmp"
        self.tmp.mkdir()
        self.leases = folder / "leases"
        self.ports = PortRegistry(folder / "ports")
        self.run_id = f"fault-{folder.name}"
        self.used: tuple[int, ...] = ()

    def plan(self, fault: Fault) -> LaunchPlan:
        env = {role: dict(variables) for role, variables in fault.env.items()}
        router = {"env": {"FAKE_READINESS": json.dumps(fault.readiness)}} if fault.readiness else {}
        pd = fault.kind == "pd"
        planned = plan(
            topology(env=env, servers=0 if pd else 1, router=router),
            self.folder / "logs",
            self.ports,
            run_id=self.run_id,
            router=FakeRouter(),
            stage_seconds=fault.stage_seconds,
            alone=not fault.readiness,
        )
        self.used = self.ports.held()
        return planned

    def launch(self, fault: Fault) -> Stack:
        limits = {"deadline_s": DEADLINE_S, "request_deadline_s": DEADLINE_S} | dict(fault.limits)
        planned = self.plan(fault)
        clock = Clock(planned.log("router"), fault.late)
        with ExitStack() as exits:
            fault.prepare(planned, exits)
            return launch(
                planned,
                deadline_s=limits["deadline_s"],
                request_deadline_s=limits["request_deadline_s"],
                progress=clock.progress,
                clock=clock,
            )

    def nothing_is_left(self) -> None:
        assert procfs.marked(self.run_id) == [], "processes"
        assert self.ports.held() == ()
        assert list(self.ports.folder.glob("*")) == [], "port locks"
        assert [port for port in self.used if port_state(port) == "busy"] == []
        assert list(self.tmp.iterdir()) == [], "temporary files"
        assert [t.name for t in threading.enumerate() if t.name.startswith("hang-watch")] == []


class Clock:
    """Runs like any clock until `late` shows in a progress line or in the router's log; then every deadline is over.

    So a deadline falls in the stage that the test is about, however slow the machine is.
    """

    def __init__(self, router_log: Path, late: str) -> None:
        self.router_log, self.late, self.ahead = router_log, late, 0.0

    def progress(self, text: str) -> None:
        if self.late and self.late in text:
            self.ahead = 1e6

    def __call__(self) -> float:
        waits = self.late.startswith("readiness") and self.router_log.exists()
        if waits and self.router_log.read_text().count("readiness") > 1:
            self.ahead = 1e6
        return time.monotonic() + self.ahead


def _nothing(planned: LaunchPlan, exits: ExitStack) -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """What is broken, and the line that must come of it."""

    reason: str
    """Regular expression for the one line."""
    env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    readiness: list[dict[str, object]] = field(default_factory=list)
    """Answers of the router in front; empty for one server without a router."""
    kind: str = "aggregated"
    late: str = ""
    """What must have been seen before the deadline falls, see Clock; empty for a deadline by the clock alone."""
    stage_seconds: Mapping[str, float] | None = None
    prepare: Callable[[LaunchPlan, ExitStack], None] = _nothing


def server(reason: str, *, late: str = "", **env: str) -> Fault:
    """One server without a router."""
    return Fault(reason, {"server": {f"FAKE_{name}": value for name, value in env.items()}}, late=late)


def routed(reason: str, *readiness: dict[str, object], late: str = "") -> Fault:
    """One good server behind a router that answers like this."""
    return Fault(reason, readiness=list(readiness), late=late)
