"""How many client processes a cell gets, and that the reason is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_pdperf.load.processes import (
    CLIENTS_A_PROCESS,
    EVENTS_A_PROCESS,
    Processes,
    explain,
    processes_for,
)
from pytest_pdperf.option_values import count_or_auto
from pytest_pdperf.spec.workload import Arrival, Cell, ClosedLoop, OpenLoop, Stream, TraceReplay

OUTPUT = 100
"""Tokens of every request here."""
FULL = EVENTS_A_PROCESS / OUTPUT
"""Requests/s of an open loop that is just enough for one process."""


def cell(*arrivals: Arrival, requests: int = 4000, output: int = OUTPUT) -> Cell:
    streams = tuple(
        Stream(name=f"s{i}", input_tokens=(8, 8), output_tokens=output, requests=requests, arrival=arrival)
        for i, arrival in enumerate(arrivals)
    )
    return Cell(workload="w", id="c", streams=streams)


@pytest.mark.parametrize(
    ("arrivals", "cores", "count", "why"),
    [
        ((ClosedLoop(concurrency=500),), 8, 1, "one core is enough"),
        ((ClosedLoop(concurrency=501),), 8, 2, "501 clients"),
        ((ClosedLoop(concurrency=300), ClosedLoop(concurrency=300)), 8, 2, "600 clients"),
        ((ClosedLoop(concurrency=2000),), 2, 2, "2000 clients call for 4, the client has 2 CPUs"),
        ((OpenLoop(rate_rps=FULL),), 8, 1, "one core is enough"),
        ((OpenLoop(rate_rps=FULL + 1),), 8, 2, f"{EVENTS_A_PROCESS + OUTPUT:,.0f} planned events/s"),
        (
            (OpenLoop(rate_rps=1, ramp_to_rps=2.5 * FULL),),
            8,
            3,
            f"{2.5 * EVENTS_A_PROCESS:,.0f} planned events/s",
        ),
        (
            (OpenLoop(rate_rps=FULL), OpenLoop(rate_rps=1)),
            8,
            2,
            f"{EVENTS_A_PROCESS + OUTPUT:,.0f} planned events/s",
        ),
        (
            (ClosedLoop(concurrency=501), OpenLoop(rate_rps=2.5 * FULL)),
            8,
            3,
            f"{2.5 * EVENTS_A_PROCESS:,.0f} planned",
        ),
    ],
)
def test_automatic(arrivals: tuple[Arrival, ...], cores: int, count: int, why: str) -> None:
    found = processes_for(cell(*arrivals), None, cores)
    assert found.count == count
    assert why in found.why


@pytest.mark.parametrize(("speed", "count"), [(1.0, 1), (2.5 * EVENTS_A_PROCESS / (10.1 * OUTPUT), 3)])
def test_automatic_for_a_trace(tmp_path: Path, speed: float, count: int) -> None:
    path = tmp_path / "t.jsonl"
    row = {"input_length": 8, "output_length": OUTPUT}
    path.write_text("\n".join(json.dumps(row | {"timestamp": 100 * i}) for i in range(101)))
    made = cell(TraceReplay(path=str(path), speed=speed), requests=101)
    assert processes_for(made, None, 8).count == count


def test_the_methods_page_says_the_same() -> None:
    said = " ".join((Path(__file__).parents[3] / "docs" / "methods.md").read_text().split())
    assert (
        f"every {CLIENTS_A_PROCESS} closed-loop clients or {EVENTS_A_PROCESS:,.0f} planned token events"
        in said
    )


def test_as_asked_but_never_more_than_can_be_busy() -> None:
    assert processes_for(cell(ClosedLoop(concurrency=4)), 3, 1) == Processes(3, "as asked")
    few = processes_for(cell(ClosedLoop(concurrency=4)), 5, 8)
    assert (few.count, few.why) == (4, "5 asked for, 4 requests can be open at once")


def test_the_plan_names_cells_where_they_differ() -> None:
    cells = [cell(ClosedLoop(concurrency=4)), cell(ClosedLoop(concurrency=800))]
    cells[1] = cells[1].model_copy(update={"id": "big"})
    assert explain(cells[:1], lambda c: processes_for(c, None, 8)) == [
        "    1 process (one core is enough for what the cell plans)"
    ]
    assert explain(cells, lambda c: processes_for(c, None, 8)) == [
        "    1 process (one core is enough for what the cell plans): c",
        "    2 processes (800 clients): big",
    ]


def test_the_option() -> None:
    assert count_or_auto("auto") is None
    assert (count_or_auto("1"), count_or_auto("64")) == (1, 64)
    for bad in ("0", "65", "-1", "two"):
        with pytest.raises(ValueError):
            count_or_auto(bad)
