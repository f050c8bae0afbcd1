"""Fixed shapes: every single-stream cell of the workload, on every topology, held against its baseline."""

import pytest

from pytest_pdperf.fixtures import Gate, Measure


@pytest.mark.pdperf_cells("single")
def test_fixed_shapes(measure: Measure, gate: Gate) -> None:
    """Zero errors, exact lengths, proven disaggregation, and no metric slower than its baseline allows."""
    gate.check(measure())
