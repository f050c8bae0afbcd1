"""The published matrix on two topologies stays a small page, built in little memory."""

import random
import tracemalloc
from pathlib import Path

from pytest_pdperf.report.html import write_html
from pytest_pdperf.report.source import load_run
from tests.unit.report.report_data import MS, START, cell_of, request, write_cell


def test_a_full_matrix_is_a_small_page(tmp_path: Path) -> None:
    dice = random.Random(7)
    for topology in ("pd-1p2d-tp2", "aggregated-3x-tp2"):
        for order, (shape, clients) in enumerate(
            (shape, clients)
            for shape in ("512/256", "4096/128", "256/1024", "8192/128")
            for clients in (1, 4, 8, 16)
        ):
            ends = [0.0] * clients
            requests = []
            for index in range(64):
                client = ends.index(min(ends))
                gaps = [
                    120.0 if dice.random() < 0.01 else 13 * dice.lognormvariate(0, 0.1) for _ in range(255)
                ]
                made = request(
                    index, sent_ms=ends[client], ttft_ms=50 * dice.lognormvariate(0, 0.4), gaps_ms=gaps
                )
                ends[client] = ((made.end_ns or 0) - START) / MS
                requests.append(made)
            write_cell(tmp_path, topology, cell_of(shape, clients, 64), requests, order=order)
    run = load_run(tmp_path)
    assert len(run.outcomes) == 32
    tracemalloc.start()
    page = write_html([run], tmp_path / "report.html")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert page.stat().st_size < 3e6
    assert peak < 100e6
