"""Samples and the gate, held to public bug reports: every input of a kind, with the answer that it must get."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.gate.baseline import BaselineProblem, loads_strict, read
from pytest_pdperf.gate.fingerprint import BaselineKey
from pytest_pdperf.gate.verdict import CellVerdict, Verdict
from pytest_pdperf.measure import alternatives, samples
from pytest_pdperf.report.exchange.detect import import_file
from tests.field_cases import ROOT, FieldCase, field_case
from tests.unit.gate.gate_tables import CATALOGUE, KEY, baseline, judged, measured
from tests.unit.measure.measure_records import request


def against(metric: str, stored: float, now: float) -> CellVerdict:
    return judged({metric: now}, baseline({metric: [stored] * 5}))


@field_case("021")
def test_021_three_numbers_called_tpot(case: FieldCase) -> None:
    given, wanted = case.given, case.want
    count = given["output_tokens"]
    events = np.linspace(given["ttft_ms"], given["last_token_ms"], count).tolist()
    made = request(events, end_ms=given["end_ms"])
    assert samples.tpot_ms(made) == pytest.approx(wanted["tpot_excl_first_ms"], abs=1e-4)
    assert alternatives.tpot_with_ttft_ms(made) == pytest.approx(wanted["tpot_incl_ttft_ms"], abs=1e-4)
    assert alternatives.tpot_of_whole_ms(made) == pytest.approx(wanted["tpot_e2e_over_n_ms"], abs=1e-4)


@field_case("022")
def test_022_gaps_are_pooled(case: FieldCase) -> None:
    given, wanted = case.given, case.want
    gaps = [np.array(values, dtype=float) for values in given["gaps_ms"].values()]
    pooled = samples.pooled(gaps)
    assert pooled.size == wanted["pooled"]["n"] and pooled.max() == wanted["pooled"]["max"]
    assert pooled.mean() == pytest.approx(wanted["pooled"]["mean"], abs=1e-3)
    for p in (50, 99):
        assert samples.percentile(pooled, p) == pytest.approx(wanted["pooled"][f"p{p}"])
    assert samples.stalls_ms(pooled).tolist() == [wanted["pooled"]["max"]], "what p99 hides is counted"
    means = [float(values.mean()) for values in gaps]
    assert samples.percentile(means, 99) == pytest.approx(wanted["per_request_mean"]["p99"], abs=1e-3)


@field_case("024")
def test_024_percentiles(case: FieldCase) -> None:
    given, wanted = case.given, case.want
    first, last = map(int, given["b"].split(".."))
    data = {**given, "b": list(range(first, last + 1))}
    for name, value in wanted["linear_numpy"].items():
        series, p = name.split("_p")
        expected = pytest.approx(value) if value is not None else None
        assert samples.percentile(data[series], float(p)) == expected, name
    for name, value in wanted["nearest_rank"].items():
        series, p = name.split("_p")
        assert samples.nearest_rank(data[series], float(p)) == value, name


@field_case("025")
def test_025_failures_come_before_any_latency(case: FieldCase) -> None:
    given, wanted = case.given, case.want
    ttfts, failed = given["ok_ttft_ms"], given["failed"]
    assert samples.percentile(ttfts, 50) == wanted["success_only"]["p50"]
    assert samples.percentile(ttfts, 95) == pytest.approx(wanted["success_only"]["p95"])
    ok, usual = wanted["success_only"]["n"], float(wanted["success_only"]["p50"])
    assert ok == len(ttfts) and failed / (ok + failed) == pytest.approx(wanted["error_rate"], abs=1e-4)
    fine = measured({"ttft_ms_p50": usual}, n=ok, requests=ok + failed, ok=ok)
    verdict = judged(fine, baseline({"ttft_ms_p50": [usual] * 5}))
    assert verdict.verdict is Verdict.INVALID
    assert [row.metric for row in verdict.rows] == ["cell"], "no latency was compared"


@field_case("027")
def test_027_a_file_whose_numbers_contradict_each_other_is_refused(case: FieldCase, tmp_path: Path) -> None:
    foreign = case.given["foreign_result"]
    path = tmp_path / "bench.jsonl"
    whole = (ROOT / "tests" / "data" / "exchange" / "sglang.jsonl").read_text().splitlines()[0]
    path.write_text(whole)
    assert import_file(path), "whole without those numbers"
    path.write_text(json.dumps(json.loads(whole) | foreign))
    with pytest.raises(UsageProblem, match="contradict each other"):
        import_file(path)


@field_case("059")
def test_059_what_is_not_finite_is_never_compared(case: FieldCase, tmp_path: Path) -> None:
    given = case.given
    with pytest.raises(ValueError, match=r"not a finite|Expecting value"):
        loads_strict(given["current"])
    path = tmp_path / "base.json"
    path.write_text(given["current"])
    with pytest.raises(BaselineProblem, match=r"base\.json"):
        read(path, CATALOGUE)
    for value in (float("nan"), float("inf")):
        assert against("ttft_ms_p50", given["baseline"]["mean_ttft_ms"], value).verdict is Verdict.INVALID


@field_case("061")
def test_061_a_pin_does_not_follow_a_slow_drift(case: FieldCase) -> None:
    given, wanted = case.given, case.want
    series, tau = given["series_ttft_ms"], given["threshold"]
    # the case's 5 % is that of output_tps; as cost per token, so that the same numbers are worse as they grow
    pinned = [against("output_tps", 1e5 / series[0], 1e5 / value).verdict for value in series]
    assert CATALOGUE["output_tps"].tau == tau
    assert (
        next(i for i, v in enumerate(pinned) if v is Verdict.SUSPECT) == wanted["pinned"]["first_red_index"]
    )
    assert all(verdict is Verdict.SUSPECT for verdict in pinned[wanted["pinned"]["first_red_index"] :])
    stale = against("ttft_ms_p50", given["stale"]["baseline"], given["stale"]["current"])
    assert "baseline stale" in stale.rows[0].note and wanted["stale"].rpartition(" ")[2] in stale.rows[0].note


@field_case("062")
def test_062_units_and_directions(case: FieldCase) -> None:
    rows = case.given["rows"]
    ours = {"request_latency": "ttft_ms_p50", "output_tok_s": "output_tps"}
    verdicts = [against(ours.get(row["metric"], row["metric"]), row["base"], row["cur"]) for row in rows]
    assert [one.verdict for one in verdicts] == [
        Verdict.INVALID,
        Verdict.INVALID,
        Verdict.SUSPECT,
        Verdict.IMPROVED,
        Verdict.IMPROVED,
    ]
    assert all("implausible" in one.rows[0].note for one in verdicts[:2])
    worse = [-1 if row["metric"] == "output_tok_s" else 1 for row in rows]
    wanted = [sign * (row["cur"] - row["base"]) / row["base"] for sign, row in zip(worse, rows, strict=True)]
    assert [one.rows[0].change for one in verdicts[2:]] == pytest.approx(wanted[2:])
    assert "--update-baselines=tighten" in verdicts[4].rows[0].note


@field_case("064")
def test_064_what_makes_numbers_incomparable(case: FieldCase) -> None:
    given, wanted = case.given, case.want
    fields = set(BaselineKey.model_fields)
    assert wanted["gpu"] == wanted["transport"] == "not comparable" and {"gpu", "gpu_count", "link"} <= fields
    assert "comparable" in wanted["version"] and not {"engine_version", "host", "driver"} & fields
    other = KEY.model_copy(update={"gpu": given["runs"]["gpu"]["gpu"]})
    assert KEY.digest != other.digest and given["runs"]["gpu"]["gpu"] in "".join(other.differences(KEY))
