"""Small decisions of the bench that need no process."""

from pathlib import Path
from typing import cast

import pytest

from pytest_pdperf.evidence.naming import damaged
from pytest_pdperf.probing import EARLIER, difference, greedy_problem, kv_damage, prompt_vocabulary
from pytest_pdperf.stack.running import Serving


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"vocab_size": 4096}', (1000, 4096)),
        ('{"vocab_size": 151936}', (1000, 30000)),
        ('{"vocab_size": 400}', (100, 400)),
        ('{"text_config": {"vocab_size": 2000}}', (500, 2000)),
        ("{}", (1000, 30000)),
        ("not json", (1000, 30000)),
    ],
)
def test_prompts_use_only_tokens_that_the_model_has(
    tmp_path: Path, config: str, expected: tuple[int, int]
) -> None:
    (tmp_path / "config.json").write_text(config)
    assert prompt_vocabulary(str(tmp_path)) == expected


def test_a_model_known_by_name_only_gets_the_usual_vocabulary() -> None:
    assert prompt_vocabulary("Qwen/Qwen3-32B") == (1000, 30000)


ROUTER, PREFILL, DECODE = "through the router", "prefill-0 alone", "decode-0 alone"


@pytest.mark.parametrize(
    ("answers", "damage"),
    [
        ({ROUTER: (1, 2), PREFILL: (1, 2), DECODE: (1, 2)}, False),
        ({ROUTER: (1, 3), PREFILL: (1, 2), DECODE: (1, 2)}, True),
        ({ROUTER: (1, 3), PREFILL: (1, 2), DECODE: (1, 3)}, False),
        ({ROUTER: (1, 3), PREFILL: (1, 2), DECODE: (1, 4)}, False),
        ({ROUTER: (1, 3), "server-0 alone": (1, 2)}, False),
        ({ROUTER: (1, 3), "prefill-0 to decode-0 directly": (1, 2)}, False),
        ({ROUTER: (1, 3), DECODE: (1, 2), "aggregated-3x": (1, 3)}, True),
    ],
)
def test_kv_is_damaged_where_only_the_way_over_the_transfer_differs(
    answers: dict[str, tuple[int, ...]], damage: bool
) -> None:
    assert kv_damage(answers) == (damaged() if damage else None)


NO_STACK = cast(Serving, None)
"""Without a tolerance nothing is asked."""


def test_an_answer_that_the_load_changed_is_a_difference() -> None:
    same = {ROUTER: (1, 2), DECODE: (1, 2), EARLIER: (1, 2)}
    assert difference(NO_STACK, 64, same, 0.0) == ""
    found = difference(NO_STACK, 64, {**same, EARLIER: (1, 3)}, 0.0)
    assert found == f"64 prompt tokens: router says (1, 2), but {{{EARLIER!r}: (1, 3)}}"
    damage = difference(NO_STACK, 300, {**same, ROUTER: (9, 9), PREFILL: (1, 2)}, 0.0)
    assert "cause: " in damage and damage.startswith("300 prompt tokens: router says (9, 9), but ")


def test_a_short_answer_is_no_answer_and_every_length_is_asked() -> None:
    asked: list[int] = []

    def ask(length: int) -> dict[str, tuple[int, ...]]:
        asked.append(length)
        return {ROUTER: (1, 2), DECODE: (1, 2) if length < 300 else (1,)}

    assert greedy_problem(NO_STACK, ask, 2, 0.0) == (
        "300 prompt tokens: 2 tokens were asked for, there came {'decode-0 alone': 1}"
    )
    assert asked == [64, 300]
    assert greedy_problem(NO_STACK, lambda length: {ROUTER: (1, 2), EARLIER: (1, 2)}, 2, 0.0) == ""
    assert "router says (1, 2)" in greedy_problem(
        NO_STACK, lambda length: {ROUTER: (1, 2), EARLIER: (1, 3)}, 2, 0.0
    )
