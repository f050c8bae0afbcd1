"""What the command line asks of simulated engines is refused with its place before anything starts."""

from pathlib import Path

import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.inputs import read_inputs
from pytest_pdperf.options import resolve


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("decod_step=2", "unknown fault 'decod_step', did you mean 'decode_step'?"),
        ("decode.decode_step", "fault 'decode_step' needs a value, as in decode_step="),
        ("link=0", "link=0: must be a finite number above 0"),
    ],
)
def test_a_fault_that_the_simulator_lacks_is_named_by_its_option(
    tmp_path: Path, fault: str, said: str
) -> None:
    line: dict[str, object] = {"pdperf_engine": "sim", "pdperf_topology": "pd-1p1d"}
    line["pdperf_sim_fault"] = [fault]
    file: dict[str, object] = {}
    with pytest.raises(UsageProblem) as caught:
        read_inputs(resolve(line.get, file.get), tmp_path)
    assert str(caught.value).startswith(f"--sim-fault {fault!r}: {said}")
