"""Placement: groups stay on NVLink and on one node, roles are kept apart, and the plan says why."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.gpus.grammar import Device, DeviceKind, parse_gpus, resolve
from pytest_pdperf.gpus.inventory import Gpu, Inventory
from pytest_pdperf.gpus.placement import Placement, place
from pytest_pdperf.spec.loader import find_topologies, shipped_fixtures
from pytest_pdperf.spec.topology import Kind, Role, RoleSpec, Topology

Recorded = Callable[[str], Inventory]
SHIPPED = [shipped_fixtures()]


def pd(
    prefill: tuple[int, int], decode: tuple[int, int], placement: dict[str, list[int]] | None = None
) -> Topology:
    roles = {Role.PREFILL: prefill, Role.DECODE: decode}
    return Topology(
        name="mine",
        kind=Kind.PD,
        roles={role: RoleSpec(replicas=r, tensor_parallel=t) for role, (r, t) in roles.items()},
        placement=placement or {},
    )


def aggregated(replicas: int, size: int = 1) -> Topology:
    spec = RoleSpec(replicas=replicas, tensor_parallel=size)
    return Topology(name="mine", kind=Kind.AGGREGATED, roles={Role.SERVER: spec})


def shipped(name: str) -> Topology:
    return find_topologies([name], SHIPPED)[0]


def run(topology: Topology, inventory: Inventory, gpus: str = "all") -> Placement:
    return place(topology, resolve(parse_gpus(gpus), inventory, None), inventory)


def indices(placement: Placement) -> dict[str, list[int | None]]:
    return {p.instance: [d.index for d in p.devices] for p in placement.placed}


def test_tensor_parallel_groups_and_roles_on_their_nodes(inventory: Recorded) -> None:
    found = run(shipped("pd-1p2d-tp2"), inventory("hgx-h100-8x"))
    assert indices(found) == {"prefill-0": [0, 1], "decode-0": [4, 5], "decode-1": [6, 7]}
    assert [p.numa_node for p in found.placed] == [0, 1, 1]
    assert found.of("prefill-0").cpus == "0-55,112-167"
    assert [d.index for d in found.unused] == [2, 3]


def test_servers_are_balanced_over_the_nodes(inventory: Recorded) -> None:
    found = run(aggregated(4), inventory("hgx-h100-8x"))
    assert sorted(p.numa_node or 0 for p in found.placed) == [0, 0, 1, 1]
    groups = run(aggregated(2, 4), inventory("hgx-h100-8x"))
    assert indices(groups) == {"server-0": [0, 1, 2, 3], "server-1": [4, 5, 6, 7]}


def test_an_order_that_invites_a_split_is_not_followed(inventory: Recorded) -> None:
    """Taking the list as it comes would put both groups across the sockets."""
    found = run(pd((1, 2), (1, 2)), inventory("hgx-h100-8x"), "0,4,1,5")
    assert indices(found) == {"prefill-0": [0, 1], "decode-0": [4, 5]}


def test_groups_follow_nvlink_bridges_not_indices(inventory: Recorded) -> None:
    found = run(pd((1, 2), (1, 2)), inventory("pcie-a100-bridged-4x"))
    assert indices(found) == {"prefill-0": [0, 2], "decode-0": [1, 3]}
    assert found.of("prefill-0").reason == "NVLink (NV12), NUMA node 0"


def test_a_group_without_nvlink_stays_on_a_node_and_says_so(inventory: Recorded) -> None:
    found = run(pd((1, 2), (1, 2)), inventory("pcie-l40s-4x"))
    assert indices(found) == {"prefill-0": [0, 1], "decode-0": [2, 3]}
    assert "no NVLink within the group (NODE): tensor parallelism will be slow" in found.of("decode-0").reason
    assert "KV path from prefill to decode: SYS (not all NVLink)" in found.explain()


def test_a_group_that_must_cross_the_sockets_says_so(inventory: Recorded) -> None:
    found = run(aggregated(1, 4), inventory("pcie-l40s-4x"))
    (placed,) = found.placed
    assert placed.numa_node is None
    assert placed.cpus == ""
    assert "no NVLink within the group (NODE, SYS)" in placed.reason
    assert "NUMA nodes 0 and 1" in placed.reason


def test_the_kv_path_stays_on_a_node_where_there_is_no_nvlink(inventory: Recorded) -> None:
    near = run(shipped("pd-1p1d"), inventory("pcie-l40s-4x"))
    assert {p.numa_node for p in near.placed} == {0}
    apart = run(shipped("pd-1p1d"), inventory("hgx-h100-8x"))
    assert [p.numa_node for p in apart.placed] == [0, 1], "over NVLink the roles get a node each"


def test_prefill_and_decode_share_a_bridge(inventory: Recorded) -> None:
    assert indices(run(shipped("pd-1p1d"), inventory("pcie-a100-bridged-4x"))) == {
        "prefill-0": [0],
        "decode-0": [2],
    }


def test_overrides_are_positions_in_the_list(inventory: Recorded) -> None:
    box = inventory("hgx-h100-8x")
    topology = pd((1, 2), (1, 1), {"prefill-0": [1, 0]})
    found = run(topology, box, "5,3,2,7")
    assert indices(found)["prefill-0"] == [3, 5], "the order of the override is kept"
    assert "set by placement" in found.of("prefill-0").reason
    assert found.of("decode-0").devices[0].index in (2, 7)
    with pytest.raises(
        UsageProblem, match=r"prefill-0 names position 9 of the --gpus list, which has 3 \(0-2\)"
    ):
        run(pd((1, 2), (1, 1), {"prefill-0": [0, 9]}), box, "0-2")


def test_the_first_measurement_keeps_its_hints(inventory: Recorded) -> None:
    for name in ("hgx-h100-8x", "hgx-h200-8x"):
        found = run(shipped("first-measurement"), inventory(name))
        assert indices(found) == {"prefill-0": [0, 1, 2, 3], "decode-0": [4, 5, 6, 7]}
        assert [p.numa_node for p in found.placed] == [0, 1]


def test_too_few_names_what_is_needed_and_what_would_fit(inventory: Recorded) -> None:
    with pytest.raises(UsageProblem) as caught:
        run(shipped("pd-1p2d-tp2"), inventory("pcie-l40s-4x"))
    message = str(caught.value)
    assert "topology pd-1p2d-tp2 needs 6 GPUs (prefill 1 x 2, decode 2 x 2), --gpus gives 4" in message
    fitting = message.partition("topologies that fit: ")[2]
    places = [
        fitting.index(name)
        for name in ("pd-1p2d (3)", "pd-1p1d (2)", "aggregated-3x (3)", "aggregated-2x (2)")
    ]
    assert places == sorted(places), "the same kind and the largest come first"
    assert "aggregated-3x-tp2" not in message


def test_too_few_for_everything(inventory: Recorded) -> None:
    devices = resolve(parse_gpus("0"), inventory("pcie-l40s-4x"), None)
    with pytest.raises(UsageProblem, match="topologies that fit: none of the known ones"):
        place(shipped("pd-1p1d"), devices, inventory("pcie-l40s-4x"))


def test_a_slice_is_one_device_and_never_part_of_a_group(inventory: Recorded) -> None:
    box = inventory("mig-h100-2x")
    found = run(shipped("pd-1p1d"), box)
    uuids = {d.uuid for p in found.placed for d in p.devices}
    assert len(uuids) == 2
    with pytest.raises(
        UsageProblem, match="prefill-0 needs 2 whole GPUs for tensor parallelism, and a MIG slice"
    ):
        run(pd((1, 2), (1, 1)), box)
    with pytest.raises(UsageProblem, match="a MIG slice cannot be part"):
        run(pd((1, 2), (1, 1), {"prefill-0": [0, 3]}), box)


def test_slices_of_one_gpu_are_noted(inventory: Recorded) -> None:
    lines = run(shipped("aggregated-3x"), inventory("mig-h100-2x")).explain()
    assert any("run on slices of GPU 0 and share its power and clocks" in line for line in lines)
    assert any(line.startswith("note: different GPU models") for line in lines)


def test_alike_gpus_are_preferred_and_mixtures_noted() -> None:
    names = ["A", "B", "B", "A"]
    box = Inventory(
        gpus=tuple(
            Gpu(index=i, uuid=f"GPU-{i}", name=name, memory_mib=1, numa_node=0, links=("SYS",) * 4)
            for i, name in enumerate(names)
        )
    )
    devices = [Device(str(i), DeviceKind.GPU, f"GPU-{i}", i) for i in range(4)]
    found = place(aggregated(2), devices, box)
    assert indices(found) == {"server-0": [0], "server-1": [3]}
    assert not found.notes
    mixed = place(aggregated(3), devices, box)
    assert "note: different GPU models (A, B): instances are not comparable" in mixed.explain()


@pytest.mark.parametrize("gpus", ["cpu", None])
def test_virtual_devices(gpus: str | None, inventory: Recorded) -> None:
    box = inventory("no-driver")
    devices = resolve(parse_gpus(gpus), box, None) if gpus else ()
    found = place(shipped("pd-1p2d-tp2"), devices, box)
    assert [p.instance for p in found.placed] == ["prefill-0", "decode-0", "decode-1"]
    assert {tuple(d.visible for d in p.devices) for p in found.placed} == {("cpu",) if gpus else ()}
    assert found.unused == ()
    assert all(p.numa_node is None for p in found.placed)
    assert len(found.explain()) == 3


def test_a_driver_that_knows_nothing_of_the_wiring() -> None:
    box = Inventory(gpus=tuple(Gpu(index=i, uuid=f"GPU-{i}", name="A", memory_mib=1) for i in range(2)))
    found = place(pd((1, 1), (1, 1)), resolve(parse_gpus("all"), box, None), box)
    assert indices(found) == {"prefill-0": [0], "decode-0": [1]}
    assert found.of("prefill-0").reason == "NUMA node unknown"
    assert "KV path from prefill to decode: ? (not all NVLink)" in found.explain()


def test_unknown_instance(inventory: Recorded) -> None:
    with pytest.raises(KeyError):
        run(shipped("pd-1p1d"), inventory("hgx-h100-8x")).of("decode-9")


machines = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 1), min_size=n, max_size=n),
        st.lists(st.integers(0, 3), min_size=n, max_size=n),
    )
)
roles = st.tuples(st.integers(1, 2), st.integers(1, 3))


def machine(nodes: Sequence[int], islands: Sequence[int]) -> Inventory:
    """GPUs with a NUMA node each; island 0 is none."""

    def link(i: int, j: int) -> str:
        if i == j:
            return "X"
        if islands[i] and islands[i] == islands[j]:
            return "NV4"
        return "NODE" if nodes[i] == nodes[j] else "SYS"

    size = range(len(nodes))
    return Inventory(
        gpus=tuple(
            Gpu(
                index=i,
                uuid=f"GPU-{i}",
                name="A",
                memory_mib=1,
                numa_node=nodes[i],
                links=tuple(link(i, j) for j in size),
            )
            for i in size
        )
    )


def cost(box: Inventory, topology: Topology, groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """What the module's docstring says is minimised, computed from the plan itself."""
    nodes = [gpu.numa_node for gpu in box.gpus]
    islands = [box.islands().get(gpu.uuid) for gpu in box.gpus]
    no_link = sum(
        any(not box.gpus[a].links[b].startswith("NV") for a, b in itertools.combinations(group, 2))
        for group in groups
    )
    crossed = sum(len({nodes[i] for i in group}) - 1 for group in groups)
    used = [(role, i) for (_, role, _), group in zip(topology.instances, groups, strict=True) for i in group]
    homes = {(role, nodes[i]) for role, i in used}
    sides = [{(islands[i], nodes[i]) for r, i in used if r is role} for role in (Role.PREFILL, Role.DECODE)]
    far = sum(a[1] != b[1] and (a[0] is None or a[0] != b[0]) for a in sides[0] for b in sides[1])
    return (
        no_link,
        crossed,
        len(homes) - len({r for r, _ in homes}),
        far,
        len(homes) - len({n for _, n in homes}),
    )


@settings(deadline=None, max_examples=40)
@given(machines, roles, roles)
def test_any_machine_gets_a_valid_plan_that_no_other_beats(
    wiring: tuple[list[int], list[int]], prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    box = machine(*wiring)
    topology = pd(prefill, decode)
    devices = resolve(parse_gpus("all"), box, None)
    if topology.gpus > len(devices):
        with pytest.raises(UsageProblem, match="needs"):
            place(topology, devices, box, candidates=())
        return
    found = place(topology, devices, box)
    used = [d.uuid for p in found.placed for d in p.devices]
    assert len(set(used)) == len(used) == topology.gpus
    assert {d.uuid for d in found.unused} == {d.uuid for d in devices} - set(used)
    sizes = {name: spec.tensor_parallel for name, _, spec in topology.instances}
    assert {p.instance: len(p.devices) for p in found.placed} == sizes
    mine = cost(box, topology, [[d.index or 0 for d in p.devices] for p in found.placed])
    for order in itertools.permutations(range(len(devices)), topology.gpus):
        rest = list(order)
        other = [[rest.pop() for _ in range(size)] for size in sizes.values()]
        assert mine <= cost(box, topology, other)


def test_a_large_node_is_placed_in_no_time(inventory: Recorded) -> None:
    """16 GPUs in bridged pairs with 16 engines: the search must not try all permutations."""
    box = machine([i // 8 for i in range(16)], [i // 2 + 1 for i in range(16)])
    found = place(pd((8, 1), (8, 1)), resolve(parse_gpus("all"), box, None), box)
    assert len({d.uuid for p in found.placed for d in p.devices}) == 16
    quarters = place(pd((2, 4), (2, 4)), resolve(parse_gpus("all"), box, None), box)
    assert {len({box.gpus[d.index or 0].numa_node for d in p.devices}) for p in quarters.placed} == {1}
