"""What a report costs after a night: the published matrix on two topologies, 32 cells x 64 requests x 256 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pytest_pdperf.report.html import write_html
from pytest_pdperf.report.markdown import write_markdown
from pytest_pdperf.report.source import load_run


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
