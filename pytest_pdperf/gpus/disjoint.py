"""Two topologies can be up at the same time only on GPUs of their own, and only where neither loses by it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.topology import Topology

from .grammar import Device, DeviceKind
from .inventory import Inventory
from .placement import Placement, place, place_all


def place_in_turn(
    topologies: Sequence[Topology], devices: Sequence[Device], inventory: Inventory
) -> dict[str, Placement]:
    """Name -> placement, each beside the one before it in the list where that costs nothing.

    Every topology gets GPUs that its predecessor leaves free, provided that it is placed there as well as it would be
    alone (links, NUMA nodes, models); else it gets what it would get alone. `placement:` overrides are positions in the
    whole list and are kept. Raises UsageProblem as `place_all` does.
    """
    alone = place_all(topologies, devices, inventory)
    found: dict[str, Placement] = {}
    before: Placement | None = None
    for topology in topologies:
        found[topology.name] = alone[topology.name]
        if before is not None and not topology.placement:
            beside = _beside(topology, before, devices, inventory)
            if beside is not None and _worth(beside) == _worth(alone[topology.name]):
                found[topology.name] = beside
        before = found[topology.name]
    return found


def why_not_together(first: Placement, second: Placement) -> str:
    """Why two placements cannot be up at the same time; empty when they can.

    Simulated engines use no device, so nothing keeps them apart; CPU engines all share the cores. MIG slices of one
    GPU share its power and clocks, so they are not disjoint either.
    """
    used = [
        {_chip(device): device for placed in side.placed for device in placed.devices}
        for side in (first, second)
    ]
    if any(device.kind is DeviceKind.CPU for side in used for device in side.values()):
        return "both run on the same CPU cores"
    shared = sorted(used[0].keys() & used[1].keys())
    return f"both use {', '.join(str(used[0][chip]) for chip in shared)}" if shared else ""


def uuids_of(placement: Placement) -> frozenset[str]:
    """UUIDs of the devices that a placement uses."""
    return frozenset(device.uuid for placed in placement.placed for device in placed.devices)


def _beside(
    topology: Topology, before: Placement, devices: Sequence[Device], inventory: Inventory
) -> Placement | None:
    taken = {_chip(device) for placed in before.placed for device in placed.devices}
    free = [device for device in devices if _chip(device) not in taken]
    if not free or len(free) < topology.gpus:
        return None
    try:
        found = place(topology, free, inventory)
    except UsageProblem:
        return None
    used = uuids_of(found)
    return replace(found, unused=tuple(device for device in devices if device.uuid not in used))


def _worth(placement: Placement) -> tuple[object, ...]:
    """What a placement says of itself without naming nodes or GPUs: equal for equally good ones."""
    said = [(placed.instance, _nameless(placed.reason)) for placed in placement.placed]
    nodes = [placed.numa_node for placed in placement.placed]
    together = tuple(nodes.index(node) for node in nodes)
    return (tuple(said), together, tuple(_nameless(note) for note in placement.notes))


def _nameless(text: str) -> str:
    return re.sub(r"\b(node|GPU) \d+", r"\1 #", text)


def _chip(device: Device) -> str:
    """The GPU of a device: for a slice the one that it is cut from."""
    return device.uuid if device.index is None else str(device.index)
