"""A verdict row of TTFT names its stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_pdperf.evidence.ttft_split import STAGES, TtftSplit
from pytest_pdperf.report.ttft_stage import from_text, stage_to_blame, to_text, usual_split


def split(**stages: float) -> TtftSplit:
    whole = sum(stages.values())
    return TtftSplit(whole, {name: stages.get(name) for name in STAGES}, 0.0)


OLD = split(prefill_queue=5.0, prefill=20.123456, transfer=8.0)
NEW = split(prefill_queue=45.0, prefill=21.0, transfer=8.0)


def test_a_stored_split_comes_back_with_four_digits_and_its_holes() -> None:
    found = from_text(to_text(OLD))
    assert found is not None
    assert found.stages["prefill"] == 20.12
    assert found.stages["bootstrap"] is None
    assert found.measured_ms == 33.12
    assert found.closure_error_ms == pytest.approx(0.0)
    for text in ("", "{}", "[]", "null", '{"measured": "x"}'):
        assert from_text(text) is None


def test_the_usual_split_is_the_mean_over_launches_that_stored_one() -> None:
    stored = [{"ttft_split": to_text(one)} for one in (OLD, NEW)]
    found = usual_split([{}, *stored, {"ttft_split": "broken"}])
    assert found is not None
    assert found.stages["prefill_queue"] == 25.0
    assert usual_split([{}]) is None
    half = usual_split([*stored, {"ttft_split": to_text(split(prefill=3.0))}])
    assert half is not None
    assert half.stages["transfer"] is None


def test_the_stage_that_moved_is_named_not_the_longest() -> None:
    text = stage_to_blame(NEW, OLD).words
    assert stage_to_blame(NEW, OLD).name == "prefill_queue"
    assert "prefill queue moved by +40.0 ms" in text
    assert "98% of the change" in text
    assert "mean 33.1 -> 74.0 ms" in text
    slower = stage_to_blame(split(prefill_queue=5.0, prefill=20.0, transfer=18.0), OLD).words
    assert "transfer moved by +10.0 ms" in slower
    still = stage_to_blame(OLD, OLD)
    assert "no stage moved" in still.words and not still.name


def test_without_a_stored_split_it_says_so_and_names_the_longest() -> None:
    text = stage_to_blame(NEW, None).words
    assert "the baseline stored none" in text
    assert "prefill queue (45.0 of 74.0 ms mean, 61%)" in text
    assert stage_to_blame(None, OLD).words.endswith("not known")
    dark = replace(NEW, stages={**NEW.stages, "prefill_queue": None})
    assert not stage_to_blame(dark, OLD).name, "what moved is not explained, which is no stage"
