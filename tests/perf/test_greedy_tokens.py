"""Silent KV corruption: the same prompt must give the same greedy tokens however it is served."""

import pytest

from pytest_pdperf.errors import CannotCompare
from pytest_pdperf.probing import kv_damage, parts_at_a_tie
from pytest_pdperf.session import Session
from pytest_pdperf.stack.running import Serving

LENGTHS = (64, 300)
"""Prompt tokens: below and above one block of the engines' usual block sizes (16 to 128 tokens)."""


@pytest.mark.pdperf_cells("none")
def test_greedy_tokens_are_equal(pdperf: Session, stack: Serving) -> None:
    """Through the router, on each engine alone, and on every other topology of this run: one answer."""
    for length in LENGTHS:
        try:
            answers = pdperf.greedy_answers(length)
        except CannotCompare as reason:
            pytest.skip(str(reason))
        expected = answers["through the router"]
        assert len(expected) == pdperf.GREEDY_TOKENS, f"{len(expected)} tokens through the router"
        different = {
            place: tokens
            for place, tokens in answers.items()
            if tokens != expected
            and not parts_at_a_tie(stack, length, expected, tokens, pdperf.settings["greedy_tolerance"])
        }
        damage = kv_damage(answers)
        cause = f"\ncause: {damage.line}" if damage else ""
        assert not different, f"{length} prompt tokens: router says {expected}, but {different}{cause}"
