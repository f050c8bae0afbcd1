"""What a report costs after a night: the published matrix on two topologies, 32 cells x 64 requests x 256 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pytest_pdperf.report.html import write_html
from pytest_pdperf.report.markdown import write_markdown
from pytest_pdperf.report.source import load_run
from tests.unit.report.report_data import cell_of, closed_loop, write_cell


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of that size."""
    folder = tmp_path_factory.mktemp("night")
    for topology, slow in (("pd-1p2d-tp2", 1.3), ("aggregated-3x-tp2", 1.0)):
        for shape in ("512/256", "4096/128", "256/1024", "8192/128"):
            for order, clients in enumerate((1, 4, 8, 16)):
                requests = closed_loop(clients, [slow * (50 + i % 9) for i in range(64)], tokens=256)
                write_cell(folder, topology, cell_of(shape, clients, 64), requests, order=order)
    return folder


@pytest.mark.benchmark(group="report", min_rounds=3)
def test_page_of_a_night(benchmark: BenchmarkFixture, night: Path, tmp_path: Path) -> None:
    """Reading the run and writing report.html."""
    path = benchmark(lambda: write_html([load_run(night)], tmp_path / "report.html"))
    assert 5e5 < path.stat().st_size < 1e7


@pytest.mark.benchmark(group="report", min_rounds=3)
def test_markdown_of_a_night(benchmark: BenchmarkFixture, night: Path, tmp_path: Path) -> None:
    """Reading the run and writing report.md."""
    path = benchmark(lambda: write_markdown([load_run(night)], tmp_path / "report.md"))
    assert path.stat().st_size > 5000
