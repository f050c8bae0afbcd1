"""What sglang-router and smg share: one grew out of the other, and flags and readiness stayed the same."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_pdperf.routers.base import RouterInstance
from pytest_pdperf.routers.flags import launch_flags
from pytest_pdperf.spec.topology import FlagValue, Kind, Role

OWNED = frozenset({"pd_disaggregation", "mini_lb"})
"""Flags that the launcher sets itself, beside those of every router."""

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


def gateway_flags(router: RouterInstance, own: Mapping[str, FlagValue] | None = None) -> list[str]:
    """Everything of the command line but the workers; `own` are the product's own defaults.

    Raises UsageProblem for args that the launcher decides.
    """
    return launch_flags(router, {**DEFAULTS, **(own or {})}, OWNED)


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
