"""Stage and fault stand in one sentence, beside the metric that they explain, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_pdperf.evidence.naming import Fault, Finding, Naming
from pytest_pdperf.evidence.speeds import Speed
from pytest_pdperf.evidence.ttft_split import STAGES, TtftSplit
from pytest_pdperf.gate.verdict import CellVerdict, Verdict, VerdictRow
from pytest_pdperf.measure.cell_result import CellResult
from pytest_pdperf.report.causes import Explained, cause_lines, explained
from pytest_pdperf.report.outcomes import CellOutcome
from pytest_pdperf.report.ttft_stage import circumstances

RESULT = CellResult("pair", "small", "in64-out48-c2", {}, requests=6, ok=6)


def split(**stages: float) -> TtftSplit:
    return TtftSplit(sum(stages.values()), {name: stages.get(name) for name in STAGES}, 0.0)


def cell(*, step_s: float = 0.005, link_rate: float = 1.2e9, **stages: float) -> CellOutcome:
    """A cell with these speeds and stages of TTFT."""
    speeds = {"prefill-0": (Speed(None, 0.02),), "decode-0": (Speed(step_s, None, link_rate),)}
    usual = {"prefill": 20.0, "transfer": 8.0, "first_decode_step": 5.0}
    return CellOutcome(
        "test",
        0,
        "pair",
        "pd",
        "sim",
        1,
        RESULT,
        ttft_split=split(**{**usual, **stages}),
        naming=Naming(speeds=speeds),
    )


BASELINE = [circumstances(cell())] * 5
"""What five healthy launches keep."""


def rows(**verdicts: Verdict) -> CellVerdict:
    made = tuple(VerdictRow(metric, verdict, note="n") for metric, verdict in verdicts.items())
    return CellVerdict(made, next(iter(verdicts.values())))


def notes(told: Explained) -> dict[str, str]:
    return {row.metric: row.note for row in told.verdict.rows}


ALL = rows(ttft_ms_p50=Verdict.FAIL, tpot_ms_p50=Verdict.SUSPECT, e2e_ms_p50=Verdict.FAIL)
LINK = "KV transfer slowed (decode-0): 98 MB/s against 1.2 GB/s in the baseline"


def test_a_slow_link_stands_beside_the_stage_that_moved() -> None:
    found = explained(ALL, cell(link_rate=98e6, transfer=98.0), BASELINE)
    assert found.more == (), "what stands in a row is not said again"
    told = notes(found)
    assert told["ttft_ms_p50"] == (
        f"n; TTFT stages: transfer moved by +90.0 ms, 100% of the change (mean 33.0 -> 123.0 ms); cause: {LINK}"
    )
    assert told["e2e_ms_p50"] == f"n; cause: {LINK}"
    assert told["tpot_ms_p50"] == "n; cause: none seen in the engines' own counters and speeds"


def test_a_fault_that_cannot_have_moved_the_stage_is_not_called_its_cause() -> None:
    """The router became slow, and so did decode's steps: TTFT rose by the router, TPOT by decode."""
    told = notes(explained(ALL, cell(step_s=0.006, router=90.0), BASELINE))
    assert told["ttft_ms_p50"].startswith("n; TTFT stages: ")
    assert "cause" not in told["ttft_ms_p50"]
    decode = "cause: decode slowed (decode-0): 6 ms a token against 5 ms a token in the baseline"
    assert told["tpot_ms_p50"] == f"n; {decode}" and told["e2e_ms_p50"] == f"n; {decode}"
    first = notes(explained(ALL, cell(step_s=0.006, first_decode_step=95.0), BASELINE))
    assert first["ttft_ms_p50"].endswith(decode), "the first decode step is one of decode's steps"


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.IMPROVED, Verdict.NOISY, Verdict.NO_BASELINE])
def test_a_cell_that_is_not_red_has_no_causes_but_what_was_noticed(verdict: Verdict) -> None:
    passed = rows(ttft_ms_p50=verdict, tpot_ms_p50=verdict)
    healthy = explained(passed, cell(), BASELINE)
    assert (healthy.verdict, healthy.more) == (passed, ())
    slow = explained(passed, cell(link_rate=98e6, transfer=98.0), BASELINE)
    assert slow.verdict == passed, "a finding changes no verdict"
    assert slow.more == (f"noticed: {LINK}",)


def test_a_small_slow_down_is_named_only_behind_a_metric_that_is_worse() -> None:
    little = cell(step_s=0.0053)
    assert explained(rows(tpot_ms_p50=Verdict.PASS), little, BASELINE).more == ()
    assert explained(rows(ttft_ms_p50=Verdict.PASS, itl_ms_p99=Verdict.NOISY), little, BASELINE).more == ()
    told = explained(rows(tpot_ms_p50=Verdict.SUSPECT), little, BASELINE)
    assert "5.3 ms a token" in notes(told)["tpot_ms_p50"]


def test_an_invalid_cell_says_its_causes_in_lines_of_their_own() -> None:
    finding = Finding(Fault.RECOMPUTED, "decode-0", "640 prompt tokens computed on decode")
    outcome = replace(cell(), naming=Naming((finding,), speeds={}))
    told = explained(rows(cell=Verdict.INVALID), outcome, [])
    assert notes(told) == {"cell": "n"}
    assert told.more == (
        "cause: decode computed prompts itself although prefill had (decode-0): "
        "640 prompt tokens computed on decode",
    )
    assert told.naming is not None and told.naming.unknown == (
        "speeds: there is no baseline to compare with",
    )
    assert cause_lines(None) == () and cause_lines(Naming()) == ()


def test_what_is_not_known_is_said_with_the_reason() -> None:
    old = [{key: text for key, text in launch.items() if key != "speeds"} for launch in BASELINE]
    told = notes(explained(ALL, cell(transfer=98.0), old))
    assert told["tpot_ms_p50"] == "n; cause: unknown (speeds: the baseline's launches kept none)"
    assert "transfer moved by +90.0 ms" in told["ttft_ms_p50"]
    nobody = notes(explained(ALL, replace(cell(), naming=None), BASELINE))
    assert nobody["tpot_ms_p50"] == "n; cause: unknown (nobody looked)"


def test_doing_it_twice_changes_nothing_also_when_notes_were_added() -> None:
    outcome = cell(link_rate=98e6, transfer=98.0)
    once = explained(ALL, outcome, BASELINE)
    again = explained(once.verdict, replace(outcome, naming=once.naming), BASELINE)
    assert again == once
    longer = replace(
        once.verdict, rows=tuple(replace(row, note=f"{row.note}; confirmed") for row in once.verdict.rows)
    )
    assert explained(longer, outcome, BASELINE).verdict == longer


def test_only_rows_that_need_attention_are_explained_in_every_stream() -> None:
    verdict = CellVerdict(
        tuple(
            VerdictRow(metric, verdict, note="n")
            for metric in ("ttft_ms_p50", "burst.ttft_ms_p95", "goodput")
            for verdict in (Verdict.PASS, Verdict.FAIL, Verdict.SUSPECT)
        ),
        Verdict.FAIL,
    )
    told = explained(verdict, cell(transfer=98.0), BASELINE).verdict
    assert [(row.metric, row.verdict) for row in told.rows if row.note != "n"] == [
        (metric, one)
        for metric in ("ttft_ms_p50", "burst.ttft_ms_p95")
        for one in (Verdict.FAIL, Verdict.SUSPECT)
    ]
    assert told.verdict is Verdict.FAIL
