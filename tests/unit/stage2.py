"""Stage 2 without stacks: a bench and a gate that are told what every launch measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pytest_pdperf.confirming import Confirming, Kept
from pytest_pdperf.evidence.canary import BEFORE, Canary, differences
from pytest_pdperf.gate.adapter import judge, suspects_of
from pytest_pdperf.gate.baseline import CellBaseline, Launch, Pin
from pytest_pdperf.gate.confirm import Suspect
from pytest_pdperf.gate.fingerprint import CellRef
from pytest_pdperf.gate.judge import set_aside
from pytest_pdperf.gate.statistics import Share
from pytest_pdperf.judging import JudgedCell, Judging
from pytest_pdperf.measure.cell_result import CellResult, MetricValue
from pytest_pdperf.measuring import Measured, TopologyLaunch
from pytest_pdperf.options import OPTIONS, Settings
from pytest_pdperf.spec.tolerances import Tolerances
from pytest_pdperf.spec.topology import Kind, Role, RoleSpec, Topology
from tests.unit.gate.gate_tables import KEY, START

BASE = 20.0
"""Stored tpot_ms_p50 of every cell, in ms; the tolerance is 5 %."""


def topology(name: str) -> Topology:
    return Topology(name=name, kind=Kind.AGGREGATED, roles={Role.SERVER: RoleSpec()})


def result(name: str, cell: str, tpot: float, **more: Any) -> CellResult:
    return CellResult(
        name, "w", cell, {"tpot_ms_p50": MetricValue(tpot, 64)}, requests=64, ok=64, wall_s=20.0, **more
    )


def baseline(cell: str, canary_ms: float | None = None, **machine: str) -> CellBaseline:
    machine |= {BEFORE: Canary({"gemm": canary_ms}).to_text()} if canary_ms else {}
    launches = tuple(
        Launch(
            id=f"l{i}",
            date=START,
            values={"tpot_ms_p50": BASE * (1 + 0.001 * (i - 3))},
            n={"tpot_ms_p50": 64},
            environment=machine,
        )
        for i in range(7)
    )
    return CellBaseline(
        CellRef("w", cell, "d"), Pin(key="k", workload_digest="d", reason="r", launches=launches)
    )


class FakeJudging:
    """The session's cells, judged by the real gate against baselines in memory."""

    def __init__(self) -> None:
        self.cells: list[JudgedCell] = []
        self.store = self
        self.after: dict[str, tuple[str, ...]] = {}
        self.shares: dict[str, Share] = {}

    def add(
        self, name: str, cell: str, tpot: float, canary_ms: float | None = None, **machine: str
    ) -> JudgedCell:
        stored, measured = baseline(cell, canary_ms, **machine), result(name, cell, tpot)
        verdict = judge(measured, stored, {}, Tolerances())
        judged = JudgedCell(topology(name), 1, measured, KEY, stored.ref, stored, verdict, None, False)
        self.cells.append(judged)
        return judged

    def suspects(self, cell: JudgedCell) -> tuple[Suspect, ...]:
        assert cell.baseline is not None
        return suspects_of(cell.result, cell.verdict, cell.baseline, {}, Tolerances(), cell=cell.id)

    def sessions(self, key: object) -> dict[str, Share]:
        return self.shares

    def recheck(self, cell: JudgedCell, environment: Mapping[str, str]) -> bool:
        assert cell.baseline is not None
        why = differences(environment, [launch.environment for launch in cell.baseline.launches])
        cell.verdict = set_aside(cell.verdict, why)
        return bool(why)


class FakeBench:
    """Launches take a minute; `speed` says what the n-th fresh launch measures of a cell."""

    relaunches = True

    def __init__(self, speed: Callable[[TopologyLaunch, int], float | Exception | CellResult]) -> None:
        self.speed = speed
        self.now = 0.0
        self.launches: list[TopologyLaunch] = []
        self.measured: list[tuple[str, str]] = []
        self.up: TopologyLaunch | None = None
        self.drops = 0
        self.machines: dict[str, dict[str, str]] = {}
        self.bring_ups: dict[str, float] = {}

    def begin(self, launch_: TopologyLaunch) -> None:
        assert self.up is None, "two launches at a time"
        self.up = launch_
        self.launches.append(launch_)
        self.now += 40.0

    def measure_cell(self, cell_id: str, workload: str) -> Measured:
        assert self.up is not None
        assert workload == "w"
        self.now += 20.0
        self.measured.append((self.up.topology.name, cell_id))
        found = self.speed(self.up, len(self.launches))
        if isinstance(found, Exception):
            raise found
        if not isinstance(found, CellResult):
            found = result(self.up.topology.name, cell_id, found)
        return cast(Measured, SimpleNamespace(result=found))

    def drop(self) -> None:
        self.drops += 1
        self.up = None

    def surroundings(self, launch_id: str) -> Mapping[str, str]:
        return self.machines.get(launch_id, {})

    def bring_up_s(self, topology: str) -> float | None:
        return self.bring_ups.get(topology)


class Stage2:
    """A confirming with its fakes."""

    def __init__(
        self, speed: Callable[[TopologyLaunch, int], Any], judging: FakeJudging, **settings: Any
    ) -> None:
        values = {option.name: None for option in OPTIONS} | {"confirm": "suspects"} | settings
        self.bench = FakeBench(speed)
        self.judging = judging
        self.said: list[str] = []
        self.clocks: dict[str, dict[str, str]] = {}
        """`<launch> <cell>` -> what its GPUs did."""
        self.confirming = Confirming(
            Settings(values, frozenset()),
            self.bench,
            cast(Judging, judging),
            "w",
            lambda text, detail=False: self.said.append(text),
            self.keep,
            clock=lambda: self.bench.now,
        )

    def keep(self, launch: TopologyLaunch, measured: Measured) -> Kept:
        name = f"{launch.id} {measured.result.cell}"
        return Kept(Path(name), self.clocks.get(name, {}))

    def run(self) -> list[JudgedCell]:
        settled = self.confirming.run()
        assert self.bench.up is None, "a launch was left behind"
        assert self.bench.drops == len(self.bench.launches)
        return settled

    @property
    def names(self) -> list[str]:
        return [launch.topology.name for launch in self.bench.launches]


def slow(launch: TopologyLaunch, number: int) -> float:
    """The build under test is 30 % slower, the reference is not."""
    return BASE if launch.reference else BASE * 1.3


def fast(launch: TopologyLaunch, number: int) -> float:
    return BASE


def note(cell: JudgedCell) -> str:
    return cell.verdict.rows[0].note


def two_topologies() -> FakeJudging:
    judging = FakeJudging()
    judging.add("blatant", "c1", BASE * 1.5)
    judging.add("blatant", "c2", BASE * 1.5)
    judging.add("doubtful", "c1", BASE * 1.07)
    return judging


def machine(ms: float) -> dict[str, str]:
    return {BEFORE: Canary({"gemm": ms}).to_text()}
