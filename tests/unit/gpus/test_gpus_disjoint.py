"""Which topologies can be up together, and that nobody is placed worse for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.gpus.disjoint import place_in_turn, uuids_of, why_not_together
from pytest_pdperf.gpus.grammar import Device, DeviceKind, parse_gpus, resolve
from pytest_pdperf.gpus.inventory import Inventory
from pytest_pdperf.gpus.placement import place_all
from pytest_pdperf.spec.topology import Topology

Recorded = Callable[[str], Inventory]


def topology(
    name: str, placement: Mapping[str, list[int]] | None = None, **roles: tuple[int, int]
) -> Topology:
    sizes = {role: {"replicas": n, "tensor_parallel": tp} for role, (n, tp) in roles.items()}
    kind = "aggregated" if "server" in roles else "pd"
    return Topology.model_validate(
        {"name": name, "kind": kind, "roles": sizes, "placement": dict(placement or {})}
    )


def all_of(found: Inventory, gpus: str = "all") -> tuple[Device, ...]:
    return resolve(parse_gpus(gpus), found, None)


A = topology("a", prefill=(1, 2), decode=(1, 2))
B = topology("b", prefill=(1, 2), decode=(1, 2))
WIDE = topology("wide", server=(3, 2))


def test_equal_topologies_get_halves_of_a_node_in_turn(inventory: Recorded) -> None:
    found = inventory("hgx-h100-8x")
    devices = all_of(found)
    placed = place_in_turn([A, B, topology("c", prefill=(1, 2), decode=(1, 2))], devices, found)
    assert why_not_together(placed["a"], placed["b"]) == ""
    assert not uuids_of(placed["a"]) & uuids_of(placed["b"])
    assert uuids_of(placed["c"]) == uuids_of(placed["a"]), "free again when its turn comes"
    assert {d.uuid for d in placed["b"].unused} == {d.uuid for d in devices} - uuids_of(placed["b"])
    alone = place_all([A], devices, found)
    assert placed["a"] == alone["a"], "the first is placed as ever"


def test_where_there_is_no_room_both_get_what_they_would_get_alone(inventory: Recorded) -> None:
    found = inventory("hgx-h100-8x")
    devices = all_of(found)
    placed = place_in_turn([A, WIDE], devices, found)
    assert placed == place_all([A, WIDE], devices, found)
    assert why_not_together(placed["a"], placed["wide"]).startswith("both use GPU ")


def test_a_worse_place_is_refused(inventory: Recorded) -> None:
    """Two bridged pairs: after a first group on one bridge only one GPU with and one without a bridge are left."""
    found = inventory("pcie-a100-bridged-4x")
    one, two = topology("one", server=(1, 1)), topology("two", server=(1, 2))
    devices = all_of(found, "0-2")
    placed = place_in_turn([one, two], devices, found)
    linked = place_all([two], devices, found)["two"]
    assert placed["two"] == linked
    assert "NVLink" in linked.placed[0].reason and "no NVLink" not in linked.placed[0].reason
    assert why_not_together(placed["one"], placed["two"])


def test_an_override_keeps_its_positions(inventory: Recorded) -> None:
    found = inventory("hgx-h100-8x")
    fixed = topology("fixed", {"server-0": [0, 1]}, server=(1, 2))
    placed = place_in_turn([A, fixed], all_of(found), found)
    assert [device.index for device in placed["fixed"].placed[0].devices] == [0, 1]
    assert "GPU 0" in why_not_together(placed["a"], placed["fixed"])


def test_what_does_not_fit_at_all_is_told_as_without_the_option(inventory: Recorded) -> None:
    found = inventory("recorded-h200-2x")
    with pytest.raises(UsageProblem, match="wide needs 6 GPUs"):
        place_in_turn([WIDE], all_of(found), found)


def test_slices_of_one_gpu_are_not_disjoint(inventory: Recorded) -> None:
    found = inventory("mig-h100-2x")
    one, two = topology("one", server=(1, 1)), topology("two", server=(1, 1))
    placed = place_in_turn([one, two], all_of(found), found)
    chips = [{device.index for p in placed[name].placed for device in p.devices} for name in ("one", "two")]
    assert bool(chips[0] & chips[1]) == bool(why_not_together(placed["one"], placed["two"]))
    same = place_all([one, two], all_of(found), found)
    assert why_not_together(same["one"], same["two"]).startswith("both use MIG-")


def test_cpu_engines_share_cores_and_simulated_ones_nothing() -> None:
    cpu = place_in_turn([A, B], [Device("cpu", DeviceKind.CPU)], Inventory())
    assert why_not_together(cpu["a"], cpu["b"]) == "both run on the same CPU cores"
    sim = place_in_turn([A, B], [], Inventory())
    assert why_not_together(sim["a"], sim["b"]) == ""
