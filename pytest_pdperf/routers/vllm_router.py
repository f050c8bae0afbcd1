"""vllm-router: starts it in front of vLLM-speaking engines and reads what it says about its workers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pytest_pdperf.engines.base import Command, Programs
from pytest_pdperf.engines.installed import head_of, python_of, version_of
from pytest_pdperf.routers.base import RouterInstance
from pytest_pdperf.routers.flags import launch_flags, missing
from pytest_pdperf.spec.topology import FlagValue, Kind, Role

PROGRAM = "vllm-router"

_OWNED = frozenset({"kv_connector", "vllm_pd_disaggregation"})
"""Flags that the launcher sets itself, beside those of every router."""

_DEFAULTS: Mapping[str, FlagValue] = {
    "worker_startup_check_interval": 1,
    # A second attempt would enter the latency of the first and hide its failure.
    "disable_retries": True,
}
"""Flags that a topology may override."""

_PAIR = re.compile(r"___prefill_addr_(?P<prefill>.+?)___decode_addr_(?P<decode>.+)_[0-9a-f]{32}(?![0-9a-f])")

START = str(Path(__file__).with_name("vllm_router_start.py"))
LAUNCHER = "from vllm_router.launch_router import main"
"""What the console script of the wheel does."""


def _counts(body: Mapping[str, object], key: str) -> tuple[int, int] | None:
    part = body.get(key)
    if not isinstance(part, Mapping):
        return None
    healthy, total = part.get("healthy"), part.get("total")
    return (healthy, total) if isinstance(healthy, int) and isinstance(total, int) else None


class VllmRouter:
    """The vLLM project's router: prefill first, then decode with the transfer parameters of prefill."""

    name = "vllm_router"

    def check(self, programs: Programs) -> None:
        """Raise UsageProblem when the program is missing."""
        if programs.find(PROGRAM) is None:
            raise missing(self.name, PROGRAM, programs)

    def command(self, router: RouterInstance, programs: Programs) -> Command:
        """Command line and environment. Raises UsageProblem for args that the launcher decides."""
        argv = [*start_of(programs.find(PROGRAM)), *launch_flags(router, _DEFAULTS, _OWNED)]
        if router.kind is Kind.PD:
            argv += self._pd_workers(router)
        else:
            argv += ["--worker-urls", *(w.url for w in router.workers)]
        return Command(tuple(argv), dict(router.spec.env))

    def _pd_workers(self, router: RouterInstance) -> list[str]:
        connector = router.kv_transfer.connector if router.kv_transfer else "nixl"
        # The example connector shares files and needs nothing from the router but the order of the two legs.
        out = [
            "--vllm-pd-disaggregation",
            "--kv-connector",
            "mooncake" if connector == "mooncake" else "nixl",
        ]
        for worker in router.workers:
            if worker.role is Role.PREFILL:
                out += ["--prefill", worker.url]
                if connector == "mooncake":
                    out.append(str(worker.ports.bootstrap))
        for worker in router.workers:
            if worker.role is Role.DECODE:
                out += ["--decode", worker.url]
        return out

    def ready_path(self, router: RouterInstance) -> str:
        """Path whose 200 answer `sees_all_workers` judges."""
        return "/readiness"

    def sees_all_workers(self, router: RouterInstance, body: Mapping[str, object]) -> bool:
        """True when the readiness body counts every configured worker of every role as healthy.

        It is not enough to be ready: this router counts a worker healthy before it has seen it answer.
        """
        want = {role: sum(w.role is role for w in router.workers) for role in Role}
        if router.kind is Kind.PD:
            return all(
                _counts(body, role.value) == (want[role], want[role]) for role in (Role.PREFILL, Role.DECODE)
            )
        servers = want[Role.SERVER]
        return body.get("healthy_workers") == servers and body.get("total_workers") == servers

    def pair_of(self, response_id: str) -> tuple[str, str] | None:
        """(prefill `host:port`, decode `host:port`) that served a PD request, read off its response id."""
        match = _PAIR.search(response_id)
        return (match["prefill"], match["decode"]) if match else None

    def supported_prompts(self) -> frozenset[str]:
        """Both forms of `/v1/completions`; `/generate` is passed on, but vLLM has no such route."""
        return frozenset({"token_ids", "text"})

    def version(self, programs: Programs) -> str:
        """Version of the installed distribution, `unknown` when it cannot be told."""
        return version_of(programs.find(PROGRAM), PROGRAM)


def start_of(program: Path | None) -> tuple[str, ...]:
    """How the router is started: its own `main` by the short way (`vllm_router_start`), else the program as it is.

    The short way is for the console script that the wheel installs; a wrapper or a binary is run itself.
    """
    python = python_of(program) if program is not None else None
    if program is None or python is None or LAUNCHER not in head_of(program):
        return (str(program) if program else PROGRAM,)
    return (str(python), START)


ROUTER = VllmRouter()
