"""Silent KV corruption: the same prompt must give the same greedy tokens however it is served."""

import pytest

from pytest_pdperf.errors import CannotCompare
from pytest_pdperf.probing import GREEDY_LENGTHS, difference
from pytest_pdperf.session import Session
from pytest_pdperf.stack.running import Serving


@pytest.mark.pdperf_cells("none")
def test_greedy_tokens_are_equal(pdperf: Session, stack: Serving) -> None:
    """Through the router, on each engine alone, on every topology of this run and before the load: one answer."""
    for length in GREEDY_LENGTHS:
        try:
            answers = pdperf.greedy_answers(length)
        except CannotCompare as reason:
            pytest.skip(str(reason))
        counts = {way: len(tokens) for way, tokens in answers.items()}
        assert set(counts.values()) == {pdperf.GREEDY_TOKENS}, counts
        problem = difference(stack, length, answers, pdperf.settings["greedy_tolerance"])
        assert not problem, problem
