"""From the pods of a cluster to a deployment by its addresses: the same thing that `--target` names by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.options import Settings
from pytest_pdperf.spec.topology import Role

from .kubernetes import Cluster
from .named import ROUTER, Named, read_named


def named_in(cluster: Cluster, settings: Settings) -> Named:
    """Open the cluster's forwards and name what lies behind them. Raises UsageProblem.

    The front door is `--target` if it is given, else the router's pod, else the only server's.
    """
    if settings["target_role"]:
        raise UsageProblem("--target-role and --k8s-selector both name engines; drop one of them")
    cluster.open(forward_router=not settings["target"])
    engines = [pod for pod in cluster.pods if pod.role != ROUTER]
    routers = [pod for pod in cluster.pods if pod.role == ROUTER]
    front = settings["target"]
    if not front and routers:
        front = cluster.urls[routers[0].id]
    if not front and len(engines) == 1 and engines[0].role == Role.SERVER.value:
        front = cluster.urls[engines[0].id]
    if not front:
        raise UsageProblem(
            "--k8s: where do requests go? Give --k8s-selector router=LABELS, or --target URL for an address of its own"
        )
    roles = [f"{pod.role}={cluster.urls[pod.id]}" for pod in engines]
    named = read_named(settings, target=front, roles=roles)
    return replace(named, hardware=named.hardware or cluster.hardware)


@contextmanager
def explained(cluster: Cluster | None) -> Iterator[None]:
    """Add to a UsageProblem what the cluster told meanwhile: no answer may mean that a forward is forbidden."""
    problems = cluster.problems if cluster is not None else []
    before = len(problems)
    try:
        yield
    except UsageProblem as problem:
        raise UsageProblem("; ".join((str(problem), *problems[before:]))) from None


def notes_of(cluster: Cluster, named: Named) -> tuple[str, ...]:
    """What has to be known about numbers that were measured this way."""
    routers = [pod for pod in cluster.pods if pod.role == ROUTER]
    notes = []
    if named.url in cluster.urls.values():
        notes.append(
            "kubernetes: the load goes through a port-forward, whose time is in every number; give --target "
            "with an address that needs none"
        )
        if len(routers) > 1:
            notes.append(f"kubernetes: of {len(routers)} routers only {routers[0].name} gets requests")
    return tuple(notes)
