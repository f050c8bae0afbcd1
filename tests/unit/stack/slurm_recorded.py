"""A Slurm that says what was written down."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_pdperf.stack.slurm.client import Answer


class Recorded:
    """Answers of a Slurm, by the beginning of what it is asked; keeps what it was asked."""

    def __init__(self, answers: Mapping[str, Answer | str]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, *argv: str) -> Answer:
        text = " ".join(argv)
        self.asked.append(text)
        for start, answer in self.answers.items():
            if text.startswith(start):
                return Answer(0, answer) if isinstance(answer, str) else answer
        raise AssertionError(f"nobody expected {text}")
