"""What sglang-router and smg share: one grew out of the other, and flags and readiness stayed the same."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_pdperf.engines.base import Programs
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.routers.base import RouterInstance
from pytest_pdperf.spec.topology import FlagValue, Kind, Role

OWNED = frozenset(
    {
        "host",
        "port",
        "policy",
        "prefill",
        "decode",
        "worker_urls",
        "pd_disaggregation",
        "mini_lb",
        "prometheus_host",
        "prometheus_port",
    }
)
"""Flags that the launcher sets itself; in a topology's router args they are a mistake."""

DEFAULTS: Mapping[str, FlagValue] = {
    # Workers are up before the router is; its own 30 s between two looks would be lost at every start.
    "worker_startup_check_interval": 1,
    # Default 60 s and 2 successes. Often enough to be seen in a cell, too seldom to be felt in one.
    "health_check_interval_secs": 10,
    "health_success_threshold": 1,
    # A second attempt would enter the latency of the first and hide its failure.
    "disable_retries": True,
    # smg holds its ports for 5 s after SIGTERM, also with nothing to finish; with this, for half a second.
    "shutdown_grace_period_secs": 1,
}
"""Flags that a topology may override."""


def launch_flags(router: RouterInstance, own: Mapping[str, FlagValue] | None = None) -> list[str]:
    """Everything of the command line but the workers; `own` are the product's own defaults.

    Raises UsageProblem for args that the launcher decides.
    """
    given = {key.replace("-", "_"): value for key, value in router.spec.args.items()}
    wrong = sorted(OWNED & given.keys())
    if wrong:
        raise UsageProblem(f"router.args.{wrong[0]} is decided by the launcher; leave it out of the topology")
    out = ["--host", router.host, "--port", str(router.port), "--policy", router.spec.policy]
    out += ["--prometheus-host", router.host, "--prometheus-port", str(router.metrics_port)]
    return out + switches({**DEFAULTS, **(own or {}), **given})


def switches(args: Mapping[str, FlagValue]) -> list[str]:
    """`disable_retries: true` -> `--disable-retries`; False and None are left out, lists become several values."""
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


def worker_flags(router: RouterInstance) -> list[str]:
    """The workers on the command line: plain URLs, or the two roles with each prefill engine's bootstrap port."""
    if router.kind is not Kind.PD:
        return ["--worker-urls", *(worker.url for worker in router.workers)]
    out = ["--pd-disaggregation"]
    for worker in router.workers:
        if worker.role is Role.PREFILL:
            out += ["--prefill", worker.url, str(worker.ports.bootstrap or "none")]
    for worker in router.workers:
        if worker.role is Role.DECODE:
            out += ["--decode", worker.url]
    return out


def counts_every_worker(router: RouterInstance, body: Mapping[str, object]) -> bool:
    """True when the readiness body counts exactly the configured workers, all of them healthy.

    `ready` alone means one server, or one of each role: both products say it while they are still adding workers.
    `/health` and `/liveness` say yes without any worker at all.
    """
    want = len(router.workers)
    return body.get("healthy_workers") == want and body.get("total_workers") == want


def missing(name: str, program: str, programs: Programs) -> UsageProblem:
    """What to say when a router's program is not there."""
    where = ", ".join(str(p) for p in programs.search) or "nowhere"
    return UsageProblem(
        f"router {name!r}: no program {program} in {where}; pip install 'pytest-pdperf[routers]', "
        "or --engine-env with an environment that has it"
    )
