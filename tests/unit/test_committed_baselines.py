"""The baselines in this repository are read by every run here: none may be edited by hand or out of date."""

from pathlib import Path

import pytest

from pytest_pdperf.gate.baseline import read
from pytest_pdperf.gate.fingerprint import digest_of
from pytest_pdperf.measure.table import METRICS
from pytest_pdperf.spec.loader import find_workload, shipped_fixtures

ROOT = Path(__file__).resolve().parents[2] / "baselines"
FILES = sorted(path for path in ROOT.rglob("*.json") if not path.is_relative_to(ROOT / "published"))


def test_there_are_baselines() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} >= {"simulatedx0", "nvidia-h200x2"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_committed_baseline_is_whole_and_its_workloads_are_those_that_ship(path: Path) -> None:
    file = read(path, METRICS)
    for cell, pins in file.cells.items():
        workload, _, name = cell.partition("/")
        shipped = {c.id: c for c in find_workload(workload, [shipped_fixtures()]).cells}
        current = [pin.workload_digest for pin in pins if pin.status == "current"]
        assert digest_of(shipped[name].load) in current, f"{cell}: the workload has changed since"
