"""Small decisions of the bench that need no process."""

from pathlib import Path

import pytest

from pytest_pdperf.probing import prompt_vocabulary


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
