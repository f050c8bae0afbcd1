"""The answers that `test_greedy_tokens.py` holds those after the load against. First of the suite by its name."""

import pytest

from pytest_pdperf.errors import CannotCompare
from pytest_pdperf.probing import greedy_problem
from pytest_pdperf.session import Session
from pytest_pdperf.stack.running import Serving


@pytest.mark.pdperf_cells("none")
def test_greedy_tokens_before_load(pdperf: Session, stack: Serving) -> None:
    """Through the router, on each engine alone and on every topology before: one answer, also from a fresh stack."""
    try:
        problem = greedy_problem(
            stack, pdperf.greedy_answers, pdperf.GREEDY_TOKENS, pdperf.settings["greedy_tolerance"]
        )
    except CannotCompare as reason:
        pytest.skip(str(reason))
    assert not problem, problem
