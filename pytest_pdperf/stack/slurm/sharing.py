"""Who gets how many CPUs of a job's nodes: a step without a number gets one CPU, and an engine on one CPU is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.stack.slurm.client import PLACE
from pytest_pdperf.stack.slurm.job import Job
from pytest_pdperf.stack.slurm.launcher import ROUTER
from pytest_pdperf.stack.slurm.nodes import Need
from pytest_pdperf.stack.slurm.step import Share

ROUTER_CPUS = 2
"""What a router would like; where a node has few it gets an eighth of them."""
CPUS_WITHOUT_GPU = 2
"""For an engine that needs no GPU, where nobody says more."""


def cpus_wanted(node_cpus: int, node_gpus: int, load: int, steps: int) -> int:
    """CPUs to ask for on every node: those that belong to its GPUs by number, and some for the router.

    `load` is how many of a node's GPUs the fullest node gives, `steps` how many instances it holds.
    """
    share = load * node_cpus // node_gpus if node_gpus else steps * CPUS_WITHOUT_GPU
    return min(node_cpus, max(share, steps) + ROUTER_CPUS)


def shares_of(
    needs: Sequence[Need], where: Mapping[str, int], job: Job, gres: str, *, gpus: bool
) -> dict[str, Share]:
    """Instance id, and `router`, -> what its step takes. The router runs on the first instance's node.

    Raises UsageProblem when a node has fewer CPUs than steps: one of them would wait for ever.
    """
    found: dict[str, Share] = {}
    for number, node in enumerate(job.nodes):
        here = [need for need in needs if where[need.id] == number]
        with_router = bool(here) and here[0] is needs[0]
        kept = max(1, min(ROUTER_CPUS, node.cpus // 8)) if with_router else 0
        total = sum(need.size for need in here)
        if node.cpus - kept < len(here):
            raise UsageProblem(
                f"{PLACE}: the job has {node.cpus} CPUs on node {node.name} for {len(here) + bool(kept)} processes; "
                "ask for more with --slurm-arg cpus-per-task=N"
            )
        spare = node.cpus - kept - len(here)
        for need in here:
            cpus = 1 + spare * need.size // total
            found[need.id] = Share(node.name, need.size if gpus else 0, cpus, gres)
        if with_router:
            found[ROUTER] = Share(node.name, 0, kept)
    return {id: found[id] for id in [*(need.id for need in needs), ROUTER]}
