"""What all benches do alike: room on disk before a cell is measured, another stack after a death."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from pytest_pdperf.errors import RoleDied
from pytest_pdperf.load.job import Job
from pytest_pdperf.load.plan import plan_cell
from pytest_pdperf.load.target import Target
from pytest_pdperf.measuring import Measuring, TopologyLaunch, room_of
from pytest_pdperf.options import resolve
from pytest_pdperf.run_files import RunFiles
from pytest_pdperf.spec.topology import Topology
from tests.unit.report.report_data import cell_of, closed_loop, write_cell


@pytest.mark.parametrize(("shape", "requests"), [("64/512", 32), ("4096/8", 16), ("16/4", 100)])
def test_a_cell_asks_for_at_least_what_its_files_take(tmp_path: Path, shape: str, requests: int) -> None:
    cell = cell_of(shape, concurrency=4, requests=requests)
    sent = closed_loop(4, [50.0] * (requests + cell.warmups), tokens=cell.main.output_tokens)
    write_cell(tmp_path, "pd-1p2d", cell, sent)
    target = Target(url="http://127.0.0.1:1", model="m", api="completions", vocab=(100_000, 999_999))
    Job(target, plan_cell(cell, target, seed=1, salt=""), 60.0, "run", (), 1).write(tmp_path / "job.json")
    taken = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert taken < room_of(cell) < 10 * taken + 2**20


class FakeStack:
    """Dies when told to."""

    url, model = "http://127.0.0.1:1", "m"
    role_urls: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        self.dead = False

    def check(self) -> None:
        if self.dead:
            raise RoleDied("decode-0", "ended with signal SIGKILL")


class FakeBench(Measuring[FakeStack]):
    """Brings such stacks up, and counts."""

    def __init__(self, said: Any) -> None:
        files = RunFiles(Path("unused"), "run")
        super().__init__(resolve(lambda _: None, lambda _: None), cast(Any, None), "run", files, said.append)
        self._launch = TopologyLaunch(cast(Topology, SimpleNamespace(name="one")), 1)
        self.ups = self.downs = 0
        self.problem: Exception | None = None

    def _bring_up(self) -> None:
        self.ups += 1
        self._stack = FakeStack()
        if self.problem:
            raise self.problem

    def _forget(self) -> str:
        return "once more"

    def take_down(self) -> None:
        self.downs += self._stack is not None
        self._stack = None


FakeBench.__abstractmethods__ = frozenset()
bench_that_says: Callable[[list[str]], FakeBench] = cast(Any, FakeBench)


def test_a_stack_is_the_same_while_it_lives_and_another_after_a_death() -> None:
    said: list[str] = []
    bench = bench_that_says(said)
    first = bench.stack()
    assert bench.stack() is first
    first.dead = True
    second = bench.stack()
    assert second is not first and not second.dead
    assert (bench.ups, bench.downs) == (2, 1)
    assert said == ["one: decode-0 ended with signal SIGKILL; once more"]


def test_a_stack_that_is_up_and_not_watched_is_none() -> None:
    bench = bench_that_says([])
    bench.problem = OSError("no environment")
    with pytest.raises(OSError, match="no environment"):
        bench.stack()
    assert (bench.ups, bench.downs) == (1, 1)
    bench.problem = None
    bench.stack()
    assert bench.ups == 2
