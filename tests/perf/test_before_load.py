"""The answers that `test_greedy_tokens.py` holds those after the load against. First of the suite by its name."""

import pytest

from pytest_pdperf.errors import CannotCompare
from pytest_pdperf.probing import GREEDY_LENGTHS, difference
from pytest_pdperf.session import Session
from pytest_pdperf.stack.running import Serving


@pytest.mark.pdperf_cells("none")
def test_greedy_tokens_before_load(pdperf: Session, stack: Serving) -> None:
    """Through the router, on each engine alone and on every topology before: one answer, also from a fresh stack."""
    for length in GREEDY_LENGTHS:
        try:
            answers = pdperf.greedy_answers(length)
        except CannotCompare as reason:
            pytest.skip(str(reason))
        counts = {way: len(tokens) for way, tokens in answers.items()}
        assert set(counts.values()) == {pdperf.GREEDY_TOKENS}, counts
        problem = difference(stack, length, answers, pdperf.settings["greedy_tolerance"])
        assert not problem, problem
