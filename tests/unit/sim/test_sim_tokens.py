"""Greedy tokens: equal for equal KV, different for any other, and text that gives its ids back."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.engines.sim.answer import damaged
from pytest_pdperf.engines.sim.tokens import continuation, detokenize, kv_digest, tokenize

VOCABULARY = 151_936
PROMPTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=50)


@given(PROMPTS, st.integers(0, 49), st.integers(1, VOCABULARY - 1))
def test_one_changed_token_changes_the_continuation(prompt: list[int], place: int, shift: int) -> None:
    place %= len(prompt)
    other = [*prompt]
    other[place] = (other[place] + shift) % VOCABULARY
    assert continuation(kv_digest(prompt), 8, VOCABULARY) == continuation(kv_digest(prompt), 8, VOCABULARY)
    assert continuation(kv_digest(prompt), 8, VOCABULARY) != continuation(kv_digest(other), 8, VOCABULARY)


@given(PROMPTS, st.integers(1, 40), st.integers(0, 40))
def test_a_longer_answer_begins_with_the_shorter_one(prompt: list[int], length: int, more: int) -> None:
    digest = kv_digest(prompt)
    assert continuation(digest, length + more, VOCABULARY)[:length] == continuation(
        digest, length, VOCABULARY
    )


def test_the_order_of_the_prompt_matters_and_its_end_too() -> None:
    assert kv_digest([1, 2]) != kv_digest([2, 1])
    assert kv_digest([1]) != kv_digest([1, 0])


def test_tokens_are_spread_over_the_vocabulary() -> None:
    tokens = continuation(kv_digest([1, 2, 3]), 20_000, VOCABULARY)
    assert all(0 <= token < VOCABULARY for token in tokens)
    quarters = Counter(token * 4 // VOCABULARY for token in tokens)
    assert all(4500 < quarters[i] < 5500 for i in range(4))


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=30))
def test_text_of_tokens_gives_the_tokens_back(tokens: list[int]) -> None:
    assert tokenize(detokenize(tokens), VOCABULARY) == tokens


def test_every_word_is_one_token() -> None:
    text = "The  quick\nbrown t99999999 t151936 tx fox t7"
    tokens = tokenize(text, VOCABULARY)
    assert len(tokens) == 8
    assert tokens[-1] == 7
    assert all(0 <= token < VOCABULARY for token in tokens)
    assert tokenize("", VOCABULARY) == []
    assert tokenize("fox", VOCABULARY) == [tokens[6]]


@given(PROMPTS, st.integers(0, 1000))
def test_damaged_kv_differs_in_one_bit(prompt: list[int], seed: int) -> None:
    digest = kv_digest(prompt)
    changed = damaged(digest, Random(seed))
    assert (int.from_bytes(digest, "big") ^ int.from_bytes(changed, "big")).bit_count() == 1
