"""The client's cores, apart from the engines', on recorded machines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.gpus.cores import client_cores, core_list, parse_cores, siblings_of
from pytest_pdperf.gpus.grammar import parse_gpus, resolve
from pytest_pdperf.gpus.inventory import Inventory
from pytest_pdperf.gpus.placement import place
from pytest_pdperf.load.worker import pin
from pytest_pdperf.spec.loader import find_topologies, shipped_fixtures

Recorded = Callable[[str], Inventory]


def bound(inventory: Inventory, topology: str, gpus: str) -> dict[str, tuple[int, ...]]:
    """CPUs that placement binds the instances of a shipped topology to."""
    made = find_topologies([topology], [shipped_fixtures()])[0]
    placed = place(made, resolve(parse_gpus(gpus), inventory, None), inventory).placed
    return {p.instance: tuple(sorted(parse_cores(p.cpus))) for p in placed if p.cpus}


def hgx_siblings(cpu: int) -> frozenset[int]:
    """CPU 0..111 are the first threads of the recorded machine's cores, 112..223 the second."""
    return frozenset({cpu % 112, cpu % 112 + 112})


def test_engines_on_one_socket_leave_the_other_to_the_client(inventory: Recorded) -> None:
    engines = bound(inventory("hgx-h100-8x"), "pd-1p2d", "0-2")
    found = client_cores(engines, range(224), siblings=hgx_siblings)
    assert core_list(found.cpus) == "56-111,168-223"
    assert found.engines == engines
    assert found.describe() == "CPUs 56-111,168-223 (no engine is bound to them)"


def test_engines_on_both_sockets_give_whole_cores_up(inventory: Recorded) -> None:
    engines = bound(inventory("hgx-h100-8x"), "pd-1p2d-tp2", "all")
    assert set().union(*engines.values()) == set(range(224))
    found = client_cores(engines, range(224), wanted=2, siblings=hgx_siblings)
    assert found.cpus == (110, 111, 222, 223)
    assert found.engines["prefill-0"] == engines["prefill-0"]
    assert set(found.engines["decode-1"]) == set(engines["decode-1"]) - set(found.cpus)
    assert "kept free of engines" in found.describe()


def test_only_cpus_that_this_process_may_use(inventory: Recorded) -> None:
    engines = bound(inventory("hgx-h100-8x"), "pd-1p2d", "0-2")
    assert client_cores(engines, range(60), siblings=hgx_siblings).cpus == (56, 57, 58, 59)


def test_two_cores_with_bound_engines_are_left_alone() -> None:
    engines = {"prefill-0": (0, 1), "decode-0": (0, 1)}
    found = client_cores(engines, {0, 1}, siblings=lambda cpu: frozenset({cpu}))
    assert (found.cpus, found.engines) == ((), engines)
    assert found.describe() == "any CPU (engines are bound to all 2 CPUs, too few to spare one)"


def test_no_engine_is_left_with_too_little() -> None:
    """Nine CPUs can spare one, eight cannot; the bound is each engine's own."""
    alone = {"siblings": lambda cpu: frozenset({cpu})}
    nine = {"a": tuple(range(9)), "b": tuple(range(9))}
    assert client_cores(nine, range(9), **alone).cpus == (8,)  # type: ignore[arg-type]
    assert client_cores(nine, range(9), wanted=2, **alone).cpus == ()  # type: ignore[arg-type]
    eight = {"a": tuple(range(8))}
    assert client_cores(eight, range(8), **alone).cpus == ()  # type: ignore[arg-type]


def test_cpu_engines_are_bound_to_nothing() -> None:
    found = client_cores({}, {0, 1})
    assert found.cpus == ()
    assert found.describe() == "any CPU (engines are not bound to CPUs, so none can be kept from them)"


def test_an_engine_that_is_bound_to_nothing_is_named() -> None:
    found = client_cores({"a": (0, 1)}, range(4), unbound=["b"])
    assert found.describe() == "CPUs 2-3 (no engine is bound to them; b may run anywhere)"


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cpus_as_linux_writes_them(cpus: set[int]) -> None:
    assert parse_cores(core_list(cpus)) == cpus


def test_lists_have_runs() -> None:
    assert core_list([8, 0, 1, 2]) == "0-2,8"
    assert parse_cores("0-2,8\n") == {0, 1, 2, 8}


def test_threads_of_a_core(tmp_path: Path) -> None:
    (tmp_path / "cpu3" / "topology").mkdir(parents=True)
    (tmp_path / "cpu3" / "topology" / "thread_siblings_list").write_text("3,7\n")
    assert siblings_of(3, tmp_path) == {3, 7}
    assert siblings_of(4, tmp_path) == {4}


def test_the_worker_pins_itself_and_says_when_it_cannot() -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []
    assert pin((4, 5), lambda pid, cpus: asked.append((pid, cpus))) == ()
    assert pin((), lambda pid, cpus: asked.append((pid, cpus))) == ()
    assert asked == [(0, (4, 5))]

    def refuse(pid: int, cpus: tuple[int, ...]) -> None:
        raise OSError(22, "Invalid argument")

    assert pin((4, 5, 9), refuse) == ("the client could not be kept to its cores 4-5,9: Invalid argument",)


@pytest.mark.parametrize("wanted", [1, 3])
def test_what_the_client_takes_no_engine_keeps(inventory: Recorded, wanted: int) -> None:
    engines = bound(inventory("hgx-h100-8x"), "aggregated-3x-tp2", "all")
    found = client_cores(engines, range(224), wanted=wanted, siblings=hgx_siblings)
    assert len(found.cpus) == 2 * wanted
    assert not set(found.cpus) & set().union(*found.engines.values())
