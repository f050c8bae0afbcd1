"""The run that reports are measured on: the published matrix on two topologies, 32 cells x 64 requests x 256 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.report.report_data import cell_of, closed_loop, write_cell


@pytest.fixture(scope="session")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of that size."""
    folder = tmp_path_factory.mktemp("night")
    for topology, slow in (("pd-1p2d-tp2", 1.3), ("aggregated-3x-tp2", 1.0)):
        for shape in ("512/256", "4096/128", "256/1024", "8192/128"):
            for order, clients in enumerate((1, 4, 8, 16)):
                requests = closed_loop(clients, [slow * (50 + i % 9) for i in range(64)], tokens=256)
                write_cell(folder, topology, cell_of(shape, clients, 64), requests, order=order)
    return folder
