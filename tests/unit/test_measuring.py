"""How much disk is asked for before a cell is measured."""

from pathlib import Path

import pytest

from pytest_pdperf.load.job import Job
from pytest_pdperf.load.plan import plan_cell
from pytest_pdperf.load.target import Target
from pytest_pdperf.measuring import room_of
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
