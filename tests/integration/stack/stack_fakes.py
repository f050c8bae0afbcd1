"""An engine for tests of the stack room: a small process that speaks vLLM's API and misbehaves on request."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_pdperf.engines.base import Command, Instance, Programs
from pytest_pdperf.routers.base import Router, RouterInstance
from pytest_pdperf.routers.registry import get_router
from pytest_pdperf.routers.vllm_router import VllmRouter
from pytest_pdperf.spec.topology import FlagValue, Topology
from pytest_pdperf.stack.plan import LaunchPlan, plan_launch
from pytest_pdperf.stack.ports import PortRegistry

PROGRAMS = Programs((Path(sys.executable).parent,))
_SCRIPT = Path(__file__).with_name("fake_engine.py")


class FakeEngine:
    name = "fake"
    default_router = "vllm_router"
    simulated = True

    def __init__(self, stage_seconds: Mapping[str, float] | None = None) -> None:
        self.stage_seconds = stage_seconds
        """Limits of start-up stages, under the default start-up timeout."""

    def check(self, programs: Programs, topology: Topology, devices: Sequence[str]) -> None:
        pass

    def command(self, instance: Instance, programs: Programs) -> Command:
        argv = (
            sys.executable,
            "-I",
            "-S",
            str(_SCRIPT),
            instance.id,
            instance.host,
            str(instance.ports.http),
        )
        return Command((*argv, instance.served_model, instance.role.value), dict(instance.env))

    def stage(self, line: str) -> str | None:
        if "Loading weights" in line:
            return "loading weights"
        return "serving" if "Starting vLLM server" in line else None

    def root_cause(self, lines: Sequence[str]) -> str | None:
        return next((line for line in lines if "Error:" in line), None)

    def version(self, programs: Programs) -> str:
        return "0"

    def longest_context(self, model: str) -> int | None:
        return None

    def supported_prompts(self) -> frozenset[str]:
        return frozenset({"token_ids", "text"})


def topology(
    *,
    prefill: int = 1,
    decode: int = 1,
    servers: int = 0,
    env: Mapping[str, Mapping[str, str]] | None = None,
    router: Mapping[str, object] | None = None,
    engine_args: Mapping[str, FlagValue] | None = None,
) -> Topology:
    """A pd topology, or an aggregated one when `servers` is given; `env` is by role."""
    counts = {"server": servers} if servers else {"prefill": prefill, "decode": decode}
    return Topology.model_validate(
        {
            "name": "t",
            "kind": "aggregated" if servers else "pd",
            "roles": {r: {"replicas": n, "env": dict((env or {}).get(r, {}))} for r, n in counts.items()},
            "router": dict(router or {}),
            "engine_args": dict(engine_args or {}),
        }
    )


class FakeRouter(VllmRouter):
    """Reads like vllm-router, but its process says what the test wants; it names no pairs."""

    def check(self, programs: Programs) -> None:
        pass

    def command(self, router: RouterInstance, programs: Programs) -> Command:
        script = str(_SCRIPT.with_name("fake_router.py"))
        argv = (sys.executable, "-I", "-S", script, router.host, str(router.port))
        return Command(argv, dict(router.spec.env))

    def pair_of(self, response_id: str) -> tuple[str, str] | None:
        return None


def plan(
    top: Topology,
    folder: Path,
    ports: PortRegistry,
    *,
    run_id: str,
    router: Router | None = None,
    stage_seconds: Mapping[str, float] | None = None,
    alone: bool = False,
) -> LaunchPlan:
    """A launch of fake engines behind `router` (the real vllm-router by default), or of one server `alone`."""
    return plan_launch(
        top,
        FakeEngine(stage_seconds),
        None if alone else router or get_router("vllm-router"),
        placement={},
        model="fake",
        served_model="m",
        programs=PROGRAMS,
        log_dir=folder,
        run_id=run_id,
        ports=ports,
    )
