"""Which instance gets which GPU decides half of a PD measurement: a pure function that explains itself.

What is minimised, in this order: different GPU models or slice sizes, tensor-parallel groups without NVLink
between all their GPUs, groups over several NUMA nodes, roles over several NUMA nodes, KV paths between
sockets without NVLink, roles that share a node, and last the position in the `--gpus` list. Replicas of
`server` have no KV path: their GPUs are balanced over the nodes instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.loader import available, find_topologies, shipped_fixtures
from pytest_pdperf.spec.topology import Kind, Role, Topology

from .grammar import Device, DeviceKind
from .inventory import Gpu, Inventory

Cost = tuple[int, ...]
Plan = tuple[tuple[int, ...], ...]
"""For each open instance, how many devices of each class it takes."""
Use = frozenset[tuple[Role, int]]
"""(role, number of a class that it uses)."""


@dataclass(frozen=True, slots=True)
class Placed:
    """One engine process and what it runs on."""

    instance: str
    role: Role
    devices: tuple[Device, ...]
    """As many as the tensor-parallel size; one `cpu` device, or none for simulated engines."""
    numa_node: int | None
    """The one NUMA node of all its GPUs; None when there are several or it is not known."""
    cpus: str
    """CPUs of that node as the driver lists them, e.g. `0-55`; empty when unknown."""
    reason: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Where every instance of a topology goes."""

    placed: tuple[Placed, ...]
    unused: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, instance: str) -> Placed:
        """The place of an instance; KeyError for an unknown one."""
        for place in self.placed:
            if place.instance == instance:
                return place
        raise KeyError(instance)

    def explain(self) -> list[str]:
        """One line for each instance, then what is left over and what to mind."""
        lines = [f"{p.instance}: {_names(p.devices) or 'no device'} ({p.reason})" for p in self.placed]
        if self.unused:
            lines.append(f"unused: {_names(self.unused)}")
        return lines + list(self.notes)


@dataclass(frozen=True, slots=True)
class _Class:
    """Devices that placement cannot tell apart."""

    model: str
    island: int | None
    numa: int | None
    whole: bool


def place(
    topology: Topology,
    devices: Sequence[Device],
    inventory: Inventory,
    candidates: Sequence[Topology] | None = None,
) -> Placement:
    """Give every instance its devices. No device is used twice.

    `devices` is what `resolve` returned; empty means simulated engines, which need none. `candidates` are
    topologies to suggest when this one does not fit (the shipped ones by default). Raises UsageProblem when
    it does not fit, when an override names a position that is not in the list, and when a group would need a
    MIG slice.
    """
    if not devices:
        return _virtual(topology, (), "simulated engine, needs no device")
    if devices[0].kind is DeviceKind.CPU:
        return _virtual(topology, tuple(devices), "CPU engine, shares the cores with all others")
    if len(devices) < topology.gpus:
        raise _too_few(topology, devices, candidates)
    fixed = _overrides(topology, devices)
    chosen = fixed | _Search(topology, devices, fixed, inventory).solve()
    used = {device.uuid for group in chosen.values() for device in group}
    placed = tuple(
        _placed(name, role, chosen[name], inventory, name in fixed) for name, role, _ in topology.instances
    )
    unused = tuple(device for device in devices if device.uuid not in used)
    return Placement(placed, unused, tuple(_notes(placed, inventory)))


def place_all(
    topologies: Sequence[Topology], devices: Sequence[Device], inventory: Inventory
) -> dict[str, Placement]:
    """Name -> placement of every topology; each has all devices to itself, because one is up at a time.

    Raises one UsageProblem with a line for each that does not fit, so that nobody meets them one run after the other.
    """
    found: dict[str, Placement] = {}
    problems: list[str] = []
    for topology in topologies:
        try:
            found[topology.name] = place(topology, devices, inventory)
        except UsageProblem as problem:
            problems.append(str(problem))
    if problems:
        raise UsageProblem("\n".join(problems))
    return found


def _virtual(topology: Topology, devices: tuple[Device, ...], reason: str) -> Placement:
    places = (Placed(name, role, devices, None, "", reason) for name, role, _ in topology.instances)
    return Placement(tuple(places))


def _overrides(topology: Topology, devices: Sequence[Device]) -> dict[str, tuple[Device, ...]]:
    fixed = {}
    for name, positions in topology.placement.items():
        beyond = [position for position in positions if position >= len(devices)]
        if beyond:
            raise UsageProblem(
                f"topology {topology.name}: placement.{name} names position {beyond[0]} of the --gpus list, "
                f"which has {len(devices)} (0-{len(devices) - 1})"
            )
        fixed[name] = tuple(devices[position] for position in positions)
        if len(positions) > 1 and any(device.kind is DeviceKind.MIG for device in fixed[name]):
            raise UsageProblem(_no_slices(topology, name, len(positions)))
    return fixed


class _Search:
    """Exhaustive over classes of equal devices: exact, and small because a node has few classes."""

    def __init__(
        self,
        topology: Topology,
        devices: Sequence[Device],
        fixed: dict[str, tuple[Device, ...]],
        inventory: Inventory,
    ) -> None:
        self.topology, self.devices, self.inventory = topology, devices, inventory
        instances = topology.instances
        self.open = [
            (name, role, spec.tensor_parallel) for name, role, spec in instances if name not in fixed
        ]
        islands = inventory.islands()
        kinds = {device.uuid: self._class(device, islands) for device in devices}
        self.classes = list(dict.fromkeys(kinds.values()))
        taken = {device.uuid for group in fixed.values() for device in group}
        self.free = [
            [device for device in devices if kinds[device.uuid] == kind and device.uuid not in taken]
            for kind in self.classes
        ]
        self.fixed_use = frozenset(
            (role, self.classes.index(kinds[device.uuid]))
            for name, role, _ in instances
            for device in fixed.get(name, ())
        )
        self.total = [sum(kinds[device.uuid] == kind for device in devices) for kind in self.classes]
        # Islands within one class differ by name alone; one that spans classes ties them together.
        spanning = {c.island for c in self.classes if [k.island for k in self.classes].count(c.island) > 1}
        alike = [
            (c.model, c.numa, c.whole, c.island is None, n)
            for c, n in zip(self.classes, self.total, strict=True)
        ]
        self.twins = [
            (i, j)
            for i, j in combinations(range(len(alike)), 2)
            if alike[i] == alike[j] and not {self.classes[i].island, self.classes[j].island} & spanning
        ]

    def _class(self, device: Device, islands: dict[str, int]) -> _Class:
        gpu = self.inventory.gpu(device.uuid)
        whole = device.kind is DeviceKind.GPU
        return _Class(
            model=_model(device, self.inventory),
            island=islands.get(device.uuid) if whole else None,
            numa=gpu.numa_node if gpu else None,
            whole=whole,
        )

    def solve(self) -> dict[str, tuple[Device, ...]]:
        left = [list(members) for members in self.free]
        order = {device.uuid: i for i, device in enumerate(self.devices)}
        chosen = {}
        for (name, _, _), counts in zip(self.open, self._plan(), strict=True):
            group: list[Device] = []
            for members, count in zip(left, counts, strict=True):
                group += members[:count]
                del members[:count]
            chosen[name] = tuple(sorted(group, key=lambda device: order[device.uuid]))
        return chosen

    def _plan(self) -> Plan:
        """How many devices of each class every open instance takes."""
        wanted, allowed = self.open, [kind.whole for kind in self.classes]

        @cache
        def best(number: int, left: tuple[int, ...], use: Use) -> tuple[Cost, Plan] | None:
            """Smallest (cost, plan) for the instances from `number` on; None when they cannot be served."""
            if number == len(wanted):
                return self._whole_cost(left, use), ()
            _, role, size = wanted[number]
            answer = None
            for counts in _draws(left, size, [whole or size == 1 for whole in allowed]):
                if self._repeats(left, counts):
                    continue
                rest = best(
                    number + 1,
                    tuple(have - take for have, take in zip(left, counts, strict=True)),
                    use | {(role, i) for i, take in enumerate(counts) if take},
                )
                if rest is not None:
                    cost = tuple(a + b for a, b in zip(self._group_cost(counts), rest[0], strict=True))
                    if answer is None or cost < answer[0]:
                        answer = cost, (counts, *rest[1])
            return answer

        found = best(0, tuple(len(members) for members in self.free), self.fixed_use)
        if found is None:
            name, _, size = next(entry for entry in self.open if entry[2] > 1)
            raise UsageProblem(_no_slices(self.topology, name, size))
        return found[1]

    def _repeats(self, left: Sequence[int], counts: Sequence[int]) -> bool:
        """True when an untouched class is drawn from before its twin: the same plan under other names."""
        return any(
            counts[later] > counts[first]
            and left[first] == self.total[first]
            and left[later] == self.total[later]
            for first, later in self.twins
        )

    def _group_cost(self, counts: Sequence[int]) -> Cost:
        """Share of one instance: models mixed, NVLink missing, NUMA nodes crossed."""
        used = [kind for kind, count in zip(self.classes, counts, strict=True) if count]
        models, nodes = {kind.model for kind in used}, {kind.numa for kind in used}
        islands = {kind.island for kind in used}
        linked = sum(counts) == 1 or (len(islands) == 1 and None not in islands)
        return (len(models) - 1, 0 if linked else 1, len(nodes) - 1, 0, 0, 0)

    def _whole_cost(self, left: Sequence[int], use: Use) -> Cost:
        """Share of the whole plan: models mixed, roles spread, KV between sockets, nodes shared by roles."""
        mixed = len({self.classes[i].model for _, i in use}) - 1
        if self.topology.kind is Kind.AGGREGATED:
            load: dict[int | None, int] = {}
            for kind, total, rest in zip(self.classes, self.total, left, strict=True):
                load[kind.numa] = load.get(kind.numa, 0) + total - rest
            return (mixed, 0, 0, sum(count * count for count in load.values()), 0, 0)
        nodes = {(role, self.classes[i].numa) for role, i in use}
        spread = len(nodes) - len({role for role, _ in nodes})
        sides = [[self.classes[i] for r, i in use if r is role] for role in (Role.PREFILL, Role.DECODE)]
        far = sum(
            a.numa != b.numa and (a.island is None or a.island != b.island)
            for a in sides[0]
            for b in sides[1]
        )
        shared = len(nodes) - len({node for _, node in nodes})
        return (mixed, 0, 0, spread, far, shared)


def _draws(left: Sequence[int], size: int, allowed: Sequence[bool]) -> Iterator[tuple[int, ...]]:
    """Every way to take `size` devices from the classes, as counts; earlier classes first."""
    if not left:
        if size == 0:
            yield ()
        return
    most = min(left[0], size) if allowed[0] else 0
    for count in range(most, -1, -1):
        for rest in _draws(left[1:], size - count, allowed[1:]):
            yield (count, *rest)


def _model(device: Device, inventory: Inventory) -> str:
    """GPU model, for a slice with its profile: instances on different ones are not alike."""
    gpu = inventory.gpu(device.uuid)
    if gpu is None:
        return ""
    profile = next((mig.profile for mig in gpu.mig_devices if mig.uuid == device.uuid), "")
    return f"{gpu.name} MIG {profile}" if device.kind is DeviceKind.MIG else gpu.name


def _placed(
    name: str, role: Role, devices: tuple[Device, ...], inventory: Inventory, override: bool
) -> Placed:
    gpus = _gpus(devices, inventory)
    nodes = {gpu.numa_node for gpu in gpus}
    node = next(iter(nodes)) if len(nodes) == 1 and len(gpus) == len(devices) else None
    cpus = {gpu.cpus for gpu in gpus}
    parts = ["set by placement"] if override else []
    if len(devices) > 1:
        parts.append(_links(gpus, inventory))
    if node is not None:
        parts.append(f"NUMA node {node}")
    elif len(nodes - {None}) > 1:
        parts.append("NUMA nodes " + " and ".join(str(n) for n in sorted(n for n in nodes if n is not None)))
    else:
        parts.append("NUMA node unknown")
    shared = next(iter(cpus)) if node is not None and len(cpus) == 1 else ""
    return Placed(name, role, devices, node, shared, ", ".join(parts))


def _gpus(devices: Sequence[Device], inventory: Inventory) -> list[Gpu]:
    return [gpu for device in devices if (gpu := inventory.gpu(device.uuid)) is not None]


def _links(gpus: Sequence[Gpu], inventory: Inventory) -> str:
    """How a group is wired: the worst path of all its pairs decides what it is called."""
    pairs = {inventory.link(a, b) for a, b in combinations(gpus, 2)}
    others = sorted(link for link in pairs if not link.startswith("NV"))
    if not others:
        return f"NVLink ({', '.join(sorted(pairs))})"
    return f"no NVLink within the group ({', '.join(others)}): tensor parallelism will be slow"


def _notes(placed: Sequence[Placed], inventory: Inventory) -> Iterator[str]:
    models = sorted({_model(device, inventory) for p in placed for device in p.devices})
    if len(models) > 1:
        yield f"note: different GPU models ({', '.join(models)}): instances are not comparable"
    paths = {
        inventory.link(a, b)
        for p in placed
        for d in placed
        if p.role is Role.PREFILL and d.role is Role.DECODE
        for a in _gpus(p.devices, inventory)
        for b in _gpus(d.devices, inventory)
    }
    if paths:
        slow = any(not path.startswith(("NV", "X")) for path in paths)
        shown = ", ".join("same GPU" if path == "X" else path for path in sorted(paths))
        yield f"KV path from prefill to decode: {shown}" + (" (not all NVLink)" if slow else "")
    owners: dict[str, list[str]] = {}
    for p in placed:
        for device in p.devices:
            gpu = inventory.gpu(device.uuid)
            if device.kind is DeviceKind.MIG and gpu is not None:
                owners.setdefault(f"GPU {gpu.index}", []).append(p.instance)
    for name, instances in owners.items():
        if len(instances) > 1:
            yield f"note: {' and '.join(instances)} run on slices of {name} and share its power and clocks"


def _too_few(
    topology: Topology, devices: Sequence[Device], candidates: Sequence[Topology] | None
) -> UsageProblem:
    needs = ", ".join(
        f"{role} {spec.replicas} x {spec.tensor_parallel}" for role, spec in topology.roles.items()
    )
    if candidates is None:
        folders = [shipped_fixtures()]
        candidates = find_topologies(available("topologies", folders), folders)
    fitting = [t for t in candidates if t.gpus <= len(devices) and t.name != topology.name]
    fitting.sort(key=lambda t: (t.kind is not topology.kind, -t.gpus, t.name))
    hint = ", ".join(f"{t.name} ({t.gpus})" for t in fitting) or "none of the known ones"
    return UsageProblem(
        f"topology {topology.name} needs {topology.gpus} GPUs ({needs}), --gpus gives {len(devices)}; "
        f"topologies that fit: {hint}"
    )


def _no_slices(topology: Topology, instance: str, size: int) -> str:
    return (
        f"topology {topology.name}: {instance} needs {size} whole GPUs for tensor parallelism, and a MIG "
        "slice cannot be part of such a group; name whole GPUs or a topology with tensor_parallel 1"
    )


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(str(device) for device in devices)
