"""What nodes there are and which instance goes to which: the placement of a run whose GPUs Slurm hands out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.topology import Role, Topology
from pytest_pdperf.stack.slurm.client import PLACE, Slurm, asked

_GRES = re.compile(
    r"(?P<name>[A-Za-z_]\w*)(?::(?P<type>[A-Za-z_][\w.-]*))?(?::(?P<count>\d+)(?P<unit>[KkMm]?))?"
)


@dataclass(frozen=True, slots=True)
class NodeKind:
    """A node as `sinfo` lists it."""

    name: str
    partition: str
    gres: Mapping[str, int]
    """`gpu:h100`, or `gpu` where Slurm knows no type -> how many."""
    cpus: int
    state: str

    def count(self, gres: str) -> int:
        """How many of a gres it has; `gpu` counts those of every type."""
        return sum(n for name, n in self.gres.items() if name == gres or name.startswith(f"{gres}:"))


def parse_gres(text: str) -> dict[str, int]:
    """`gpu:h100:8(S:0-1),nic:2` -> counts by name and type. What is no countable gres is left out."""
    found: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        match = _GRES.fullmatch(part.strip())
        if match and match["name"] != "null":
            name = f"{match['name']}:{match['type']}" if match["type"] else match["name"]
            factor = {"": 1, "k": 1024, "m": 1024**2}[match["unit"].lower() if match["unit"] else ""]
            found[name] = found.get(name, 0) + int(match["count"] or 1) * factor
    return found


def read_nodes(run: Slurm, partition: str | None) -> tuple[NodeKind, ...]:
    """Nodes of a partition (the default one for None) that are not down. Raises UsageProblem when there is none."""
    where = ("-p", partition) if partition else ()
    out = asked(run, "sinfo", "--noheader", "--Node", *where, "-o", "%N|%P|%G|%c|%T")
    rows = [row for line in out.splitlines() if len(row := line.strip().split("|")) == 5]
    if not partition:
        rows = [row for row in rows if row[1].endswith("*")] or rows
    down = ("down", "drain", "fail", "unk", "maint", "error", "inval")
    nodes = tuple(
        NodeKind(name, part.rstrip("*"), parse_gres(gres), int(cpus) if cpus.isdigit() else 1, state)
        for name, part, gres, cpus, state in rows
    )
    up = tuple(node for node in nodes if not node.state.startswith(down))
    if not up:
        shown = f"partition {partition}" if partition else "the default partition"
        states = ", ".join(f"{node.name} is {node.state}" for node in nodes[:4])
        raise UsageProblem(f"{PLACE}: sinfo lists no usable node in {shown}{': ' + states if states else ''}")
    return up


@dataclass(frozen=True, slots=True)
class Need:
    """What one instance takes of a node."""

    id: str
    role: Role
    size: int
    """GPUs; 1 for an instance that needs none."""


def needs_of(topology: Topology, *, gpus: bool) -> tuple[Need, ...]:
    """Every instance in start order. Raises UsageProblem for a placement by position, which is Slurm's business."""
    if topology.placement:
        name = next(iter(topology.placement))
        raise UsageProblem(
            f"topology {topology.name}: placement.{name} names positions in the --gpus list, but under {PLACE} "
            "Slurm hands the GPUs out; leave placement out"
        )
    return tuple(
        Need(name, role, spec.tensor_parallel if gpus else 1) for name, role, spec in topology.instances
    )


def spread(needs: Sequence[Need], rooms: Sequence[int]) -> dict[str, int] | None:
    """Instance id -> number of its node, or None when they do not fit; `rooms` is what each node can take.

    Nodes are filled in order and, where the rest still fits, a new role begins on a new node: KV then crosses the
    network in the same way for every pair. Within what fits, the fullest node is as empty as it can be.
    """
    largest = max((need.size for need in needs), default=0)
    for cap in range(largest, max(rooms, default=0) + 1):
        found = _fill(needs, [min(room, cap) for room in rooms])
        if found is not None:
            return found
    return None


def _fill(needs: Sequence[Need], rooms: Sequence[int]) -> dict[str, int] | None:
    found: dict[str, int] = {}
    node, left, role = 0, rooms[0] if rooms else 0, needs[0].role if needs else None
    for number, need in enumerate(needs):
        fresh = need.role is not role and left != rooms[node]
        if fresh and node + 1 < len(rooms) and _fill(needs[number:], rooms[node + 1 :]) is not None:
            node, left = node + 1, rooms[node + 1]
        while need.size > left:
            node += 1
            if node == len(rooms):
                return None
            left = rooms[node]
        found[need.id], left, role = node, left - need.size, need.role
    return found


def fewest_nodes(needs: Sequence[Need], room: int, topology: str) -> int:
    """How many nodes with `room` each it takes. Raises UsageProblem for an instance that fits on none."""
    for need in needs:
        if need.size > room:
            raise UsageProblem(
                f"topology {topology}: {need.id} needs {need.size} GPUs of one node, and the largest has {room}; "
                "an instance cannot span nodes here: lower its tensor_parallel"
            )
    count = 1
    while spread(needs, [room] * count) is None:
        count += 1
    return count


def loads(needs: Sequence[Need], where: Mapping[str, int]) -> dict[int, int]:
    """Number of a node -> what its instances take of it."""
    found: dict[int, int] = {}
    for need in needs:
        found[where[need.id]] = found.get(where[need.id], 0) + need.size
    return found
