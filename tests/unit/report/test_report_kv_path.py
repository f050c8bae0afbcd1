"""Topologies that differ only in how the KV cache moves stand beside each other, and TCP is held against RDMA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pytest_pdperf.report.claims import claims_of
from pytest_pdperf.report.grid import Grid, build_grid
from pytest_pdperf.report.html import heat_rows
from pytest_pdperf.report.kv_path import details_of, read_kv_path
from pytest_pdperf.report.markdown import render
from pytest_pdperf.report.outcomes import CellOutcome
from pytest_pdperf.report.screen import comparison_table
from pytest_pdperf.report.source import Run
from pytest_pdperf.report.terminal import render_table
from pytest_pdperf.spec.loader import find_topologies, shipped_fixtures
from tests.unit.report.report_data import outcome

RDMA, TCP, PLAIN = "pd-1p2d-tp2", "pd-1p2d-tp2-tcp", "aggregated-3x-tp2"
CELLS = ("in512-out256-c1", "in512-out256-c16")
TTFT = {RDMA: 100.0, TCP: 250.0, PLAIN: 90.0}


def measured(topology: str, cell: str, order: int = 0) -> CellOutcome:
    (spec,) = find_topologies([topology], [shipped_fixtures()])
    made = outcome(cell, topology, order=order, ttft_ms_p50=TTFT[topology])
    return replace(made, details=details_of(spec))


def run_of(*topologies: str, name: str = "r") -> Run:
    made = [measured(topology, cell) for topology in topologies for cell in CELLS]
    return Run(name=name, folder=Path(name), outcomes=tuple(made))


def grid_of(*topologies: str) -> Grid:
    return build_grid([run_of(*topologies)])


def order_in(lines: Sequence[str], cell: str) -> list[str]:
    """Topologies in the order of a table's lines, from the line of this cell on."""
    start = next(number for number, line in enumerate(lines) if cell in line)
    words = [word for line in lines[start:] for word in line.replace("|", " ").split()]
    return list(dict.fromkeys(word for word in words if word in TTFT))


def printed(grid: Grid) -> list[str]:
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(comparison_table(grid, colour=False))
    return capture.get().splitlines()


def test_the_shipped_pair_is_one_layout_over_two_paths() -> None:
    rdma, tcp = (read_kv_path(measured(name, CELLS[0]).details) for name in (RDMA, TCP))
    assert rdma is not None and tcp is not None
    assert rdma.layout == tcp.layout
    assert (rdma.connector, rdma.transport, tcp.connector, tcp.transport) == (
        "nixl",
        "auto",
        "mooncake",
        "tcp",
    )
    assert measured(PLAIN, CELLS[0]).details == {}
    (other,) = find_topologies(["pd-1p2d"], [shipped_fixtures()])
    assert details_of(other)["kv_path"]["layout"] != rdma.layout, (
        "another tensor parallelism is another layout"
    )


def test_tcp_stands_beside_rdma_in_every_table() -> None:
    run, wanted = run_of(RDMA, PLAIN, TCP), [RDMA, TCP, PLAIN]
    grid = build_grid([run])
    assert order_in(render_table(run.outcomes).splitlines(), CELLS[0]) == wanted
    assert order_in(printed(grid), CELLS[0]) == wanted
    assert order_in(list(render([run])), "| topology |") == wanted
    assert [row.series.topology for row in heat_rows(grid) if row.cell == CELLS[1]] == wanted


@pytest.mark.parametrize("topologies", [(RDMA, TCP), (TCP, RDMA)])
def test_without_aggregated_serving_tcp_is_held_against_rdma(topologies: tuple[str, ...]) -> None:
    grid = grid_of(*topologies)
    by_name = {series.topology: series for series in grid.series}
    assert grid.reference(by_name[TCP]) is by_name[RDMA]
    assert grid.reference(by_name[RDMA]) is None
    tiles = {row.series.topology: row.reference[0].change for row in heat_rows(grid) if row.cell == CELLS[0]}
    assert tiles == {TCP: "+150%", RDMA: ""}


def test_beside_aggregated_serving_both_comparisons_are_told() -> None:
    told = [claim.text for claim in claims_of(grid_of(RDMA, TCP, PLAIN)) if claim.text.startswith("TTFT p50")]
    assert any(f"higher on {TCP} than on {PLAIN} in 2 of 2 cells" in text for text in told)
    assert any(f"higher on {TCP} than on {RDMA} in 2 of 2 cells" in text for text in told)
    assert len(told) == 3, "RDMA beside aggregated serving is the third"


def test_runs_keep_their_own_columns() -> None:
    grid = build_grid([run_of(RDMA, PLAIN, name="old"), run_of(TCP, name="new")])
    assert [series.topology for series in grid.series] == [RDMA, PLAIN, TCP]
    assert grid.other_path(grid.series[2]) is None, "the other run is another night"


@pytest.mark.parametrize("found", [None, "tcp", {}, {"layout": "x", "connector": "nixl"}, {"layout": 1}])
def test_a_run_that_does_not_say_is_left_as_it_is(found: object) -> None:
    assert read_kv_path({"kv_path": found}) is None
    made = replace(outcome(), details={"kv_path": found})
    (series,) = build_grid([Run(name="r", folder=Path("r"), outcomes=(made,))]).series
    assert series.path is None
