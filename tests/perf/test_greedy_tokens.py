"""Silent KV corruption: the same prompt must give the same greedy tokens however it is served."""

import pytest

from pytest_pdperf.errors import CannotCompare
from pytest_pdperf.probing import greedy_problem
from pytest_pdperf.session import Session
from pytest_pdperf.stack.running import Serving


@pytest.mark.pdperf_cells("none")
def test_greedy_tokens_are_equal(pdperf: Session, stack: Serving) -> None:
    """Through the router, on each engine alone, on every topology of this run and before the load: one answer."""
    try:
        problem = greedy_problem(
            stack, pdperf.greedy_answers, pdperf.GREEDY_TOKENS, pdperf.settings["greedy_tolerance"]
        )
    except CannotCompare as reason:
        pytest.skip(str(reason))
    assert not problem, problem
