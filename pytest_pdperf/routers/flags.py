"""What every router's command line has in common, so that each router's module holds only what is its own."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_pdperf.engines.base import Programs
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.routers.base import RouterInstance
from pytest_pdperf.spec.topology import FlagValue

OWNED = frozenset(
    {
        "host",
        "port",
        "policy",
        "prefill",
        "decode",
        "worker_urls",
        "prometheus_host",
        "prometheus_port",
    }
)
"""Flags that the launcher sets itself for every router; in a topology's router args they are a mistake."""


def launch_flags(
    router: RouterInstance, defaults: Mapping[str, FlagValue], owned: frozenset[str] = frozenset()
) -> list[str]:
    """Everything of the command line but the workers; a topology's router args win over `defaults`.

    `owned` are flags that the launcher sets for this router beside OWNED. Raises UsageProblem for an arg among them.
    """
    given = {key.replace("-", "_"): value for key, value in router.spec.args.items()}
    wrong = sorted((OWNED | owned) & given.keys())
    if wrong:
        raise UsageProblem(f"router.args.{wrong[0]} is decided by the launcher; leave it out of the topology")
    out = ["--host", router.host, "--port", str(router.port), "--policy", router.spec.policy]
    out += ["--prometheus-host", router.host, "--prometheus-port", str(router.metrics_port)]
    return out + switches({**defaults, **given})


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


def missing(name: str, program: str, programs: Programs) -> UsageProblem:
    """What to say when a router's program is not there."""
    where = ", ".join(str(p) for p in programs.search) or "nowhere"
    return UsageProblem(
        f"router {name!r}: no program {program} in {where}; pip install 'pytest-pdperf[routers]', "
        "or --engine-env with an environment that has it"
    )
