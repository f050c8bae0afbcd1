"""From a launch of this run to its plan: the one place where a run's inputs and its site meet."""

from __future__ import annotations

from pathlib import Path

from .inputs import Inputs, without_faults
from .measuring import TopologyLaunch
from .sites import Site
from .stack.plan import LaunchPlan, plan_launch


def plan_of(
    launch: TopologyLaunch,
    inputs: Inputs,
    site: Site,
    *,
    logs: Path,
    run_id: str,
    client_processes: int,
) -> LaunchPlan:
    """Everything about one launch decided, its ports reserved. `logs` is the folder of the run's logs.

    Raises UsageProblem as `plan_launch` does.
    """
    topology = launch.topology
    placement = site.placement(topology.name)
    programs, role_args = inputs.programs, inputs.role_args
    if launch.reference:
        assert inputs.reference_programs is not None, "a reference launch without --reference"
        programs, role_args = inputs.reference_programs, without_faults(role_args)
    return plan_launch(
        topology,
        inputs.engines[topology.name],
        inputs.routers[topology.name],
        placement=site.visible(topology),
        numa={p.instance: p.numa_node for p in placement.placed if p.numa_node is not None},
        model=inputs.model,
        served_model=inputs.served_model,
        programs=programs,
        log_dir=logs / launch.id,
        run_id=run_id,
        ports=site.ports,
        launcher=site.launcher(topology),
        extra_args=inputs.engine_args,
        role_args={role: args for role, args in role_args.items() if role in topology.roles},
        client_processes=client_processes,
    )
