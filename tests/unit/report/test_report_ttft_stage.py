"""A verdict row of TTFT names its stage."""

from __future__ import annotations

import pytest

from pytest_pdperf.evidence.ttft_split import STAGES, TtftSplit
from pytest_pdperf.gate.verdict import CellVerdict, Verdict, VerdictRow
from pytest_pdperf.report.ttft_stage import explain, from_text, to_text, usual_split, with_stage


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
    text = explain(NEW, OLD)
    assert "prefill queue moved by +40.0 ms" in text
    assert "98% of the change" in text
    assert "mean 33.1 -> 74.0 ms" in text
    slower = explain(split(prefill_queue=5.0, prefill=20.0, transfer=18.0), OLD)
    assert "transfer moved by +10.0 ms" in slower
    assert "no stage moved" in explain(OLD, OLD)


def test_without_a_stored_split_it_says_so_and_names_the_longest() -> None:
    text = explain(NEW, None)
    assert "the baseline stored none" in text
    assert "prefill queue (45.0 of 74.0 ms mean, 61%)" in text
    assert explain(None, OLD).endswith("not known")


def test_only_ttft_rows_that_need_attention_are_explained_and_only_once() -> None:
    rows = tuple(
        VerdictRow(metric, verdict, note="n")
        for metric in ("ttft_ms_p50", "burst.ttft_ms_p95", "tpot_ms_p50")
        for verdict in (Verdict.PASS, Verdict.FAIL, Verdict.SUSPECT)
    )
    once = with_stage(CellVerdict(rows, Verdict.FAIL), "TTFT stages: x")
    told = [(row.metric, row.verdict) for row in once.rows if row.note == "n; TTFT stages: x"]
    assert told == [
        (metric, verdict)
        for metric in ("ttft_ms_p50", "burst.ttft_ms_p95")
        for verdict in (Verdict.FAIL, Verdict.SUSPECT)
    ]
    assert all(row.note == "n" for row in once.rows if (row.metric, row.verdict) not in told)
    assert with_stage(once, "TTFT stages: x") == once
    assert once.verdict is Verdict.FAIL
