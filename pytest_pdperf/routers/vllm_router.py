"""vllm-router: starts it in front of vLLM-speaking engines and reads what it says about its workers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pytest_pdperf.engines.base import Command, Programs
from pytest_pdperf.engines.installed import head_of, python_of
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.routers.base import RouterInstance
from pytest_pdperf.spec.topology import FlagValue, Kind, Role

_OWNED = frozenset(
    {
        "host",
        "port",
        "policy",
        "prefill",
        "decode",
        "worker_urls",
        "kv_connector",
        "vllm_pd_disaggregation",
        "prometheus_host",
        "prometheus_port",
    }
)
"""Flags that the launcher sets itself; in a topology's router args they are a mistake."""

_PAIR = re.compile(r"___prefill_addr_(?P<prefill>.+?)___decode_addr_(?P<decode>.+)_[0-9a-f]{32}(?![0-9a-f])")


START = str(Path(__file__).with_name("vllm_router_start.py"))
LAUNCHER = "from vllm_router.launch_router import main"
"""What the console script of the wheel does."""


def _flags(args: Mapping[str, FlagValue]) -> list[str]:
    out: list[str] = []
    for key, value in args.items():
        flag = "--" + key.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            out.append(flag)
        elif isinstance(value, list):
            out += [flag, *map(str, value)]
        else:
            out += [flag, str(value)]
    return out


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
        if programs.find("vllm-router") is None:
            where = ", ".join(str(p) for p in programs.search) or "nowhere"
            raise UsageProblem(
                f"router 'vllm_router': no program vllm-router in {where}; "
                "pip install 'pytest-pdperf[routers]', or --engine-env with an environment that has it"
            )

    def command(self, router: RouterInstance, programs: Programs) -> Command:
        """Command line and environment.

        Retries are off: a second attempt would enter the latency of the first and hide its failure.
        Raises UsageProblem for args that the launcher decides, and for a connector the router does not speak.
        """
        wrong = sorted(_OWNED & {key.replace("-", "_") for key in router.spec.args})
        if wrong:
            raise UsageProblem(
                f"router.args.{wrong[0]} is decided by the launcher; leave it out of the topology"
            )
        argv = [*start_of(programs.find("vllm-router")), "--host", router.host, "--port", str(router.port)]
        argv += ["--policy", router.spec.policy]
        argv += ["--prometheus-host", router.host, "--prometheus-port", str(router.metrics_port)]
        defaults: dict[str, FlagValue] = {"worker_startup_check_interval": 1, "disable_retries": True}
        argv += _flags(defaults | {k.replace("-", "_"): v for k, v in router.spec.args.items()})
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
        program = programs.find("vllm-router")
        if program is not None:
            for info in program.parent.parent.glob("lib/python3*/site-packages/vllm_router-*.dist-info"):
                return info.name.removeprefix("vllm_router-").removesuffix(".dist-info")
        return "unknown"


def start_of(program: Path | None) -> tuple[str, ...]:
    """How the router is started: its own `main` by the short way (`vllm_router_start`), else the program as it is.

    The short way is for the console script that the wheel installs; a wrapper or a binary is run itself.
    """
    python = python_of(program) if program is not None else None
    if program is None or python is None or LAUNCHER not in head_of(program):
        return (str(program) if program else "vllm-router",)
    return (str(python), START)


ROUTER = VllmRouter()
