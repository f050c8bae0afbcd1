"""The shared collection of field cases, areas 2 (samples) and 6 (gate), read where it lies beside the repository.

Every case has hand-made tests of its own elsewhere; this holds the code to the collection's own numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.gate.baseline import BaselineProblem, loads_strict, read
from pytest_pdperf.gate.fingerprint import BaselineKey
from pytest_pdperf.gate.verdict import CellVerdict, Verdict
from pytest_pdperf.measure import alternatives, samples
from pytest_pdperf.report.exchange.detect import import_file
from tests.unit.gate.gate_tables import CATALOGUE, KEY, baseline, judged, measured
from tests.unit.measure.measure_records import request

CASES = Path(__file__).resolve().parents[3].parent / "shared" / "cases"
pytestmark = pytest.mark.skipif(
    not CASES.is_dir(), reason="the shared case collection does not lie beside it"
)


def case(number: str) -> tuple[Any, Any]:
    """(input, expected) of one case."""
    (path,) = CASES.glob(f"{number}-*.yaml")
    data = yaml.safe_load(path.read_text())
    return data["input"], data["expected"]


def against(metric: str, stored: float, now: float) -> CellVerdict:
    return judged({metric: now}, baseline({metric: [stored] * 5}))


def test_021_three_numbers_called_tpot() -> None:
    given, wanted = case("021")
    count = given["output_tokens"]
    events = np.linspace(given["ttft_ms"], given["last_token_ms"], count).tolist()
    made = request(events, end_ms=given["end_ms"])
    assert samples.tpot_ms(made) == pytest.approx(wanted["tpot_excl_first_ms"], abs=1e-4)
    assert alternatives.tpot_with_ttft_ms(made) == pytest.approx(wanted["tpot_incl_ttft_ms"], abs=1e-4)
    assert alternatives.tpot_of_whole_ms(made) == pytest.approx(wanted["tpot_e2e_over_n_ms"], abs=1e-4)


def test_022_gaps_are_pooled() -> None:
    given, wanted = case("022")
    gaps = [np.array(values, dtype=float) for values in given["gaps_ms"].values()]
    pooled = samples.pooled(gaps)
    assert pooled.size == wanted["pooled"]["n"] and pooled.max() == wanted["pooled"]["max"]
    assert pooled.mean() == pytest.approx(wanted["pooled"]["mean"], abs=1e-3)
    assert [samples.percentile(pooled, p) for p in (50, 99)] == [wanted["pooled"][p] for p in ("p50", "p99")]
    assert samples.stalls_ms(pooled).tolist() == [500.0], "what p99 hides is counted"
    means = [float(values.mean()) for values in gaps]
    assert samples.percentile(means, 99) == pytest.approx(wanted["per_request_mean"]["p99"], abs=1e-3)


def test_024_percentiles() -> None:
    given, wanted = case("024")
    data = {**given, "b": list(range(1, 101))}
    for name, value in wanted["linear_numpy"].items():
        series, p = name.split("_p")
        expected = pytest.approx(value) if value is not None else None
        assert samples.percentile(data[series], float(p)) == expected, name
    for name, value in wanted["nearest_rank"].items():
        series, p = name.split("_p")
        assert samples.nearest_rank(data[series], float(p)) == value, name


def test_025_failures_come_before_any_latency() -> None:
    given, wanted = case("025")
    ttfts, failed = given["ok_ttft_ms"], given["failed"]
    assert samples.percentile(ttfts, 50) == wanted["success_only"]["p50"]
    assert samples.percentile(ttfts, 95) == pytest.approx(wanted["success_only"]["p95"])
    fine = measured({"ttft_ms_p50": 125.0}, n=6, requests=6 + failed, ok=6)
    verdict = judged(fine, baseline({"ttft_ms_p50": [125.0] * 5}))
    assert verdict.verdict is Verdict.INVALID
    assert [row.metric for row in verdict.rows] == ["cell"], "no latency was compared"


def test_027_a_file_whose_numbers_contradict_each_other_is_refused(tmp_path: Path) -> None:
    foreign = case("027")[0]["foreign_result"]
    path = tmp_path / "bench.jsonl"
    sample = (CASES.parent / "samples" / "sglang_bench_2026.jsonl").read_text().splitlines()[0]
    path.write_text(json.dumps(json.loads(sample) | foreign))
    with pytest.raises(UsageProblem, match="contradict each other"):
        import_file(path)


def test_059_what_is_not_finite_is_never_compared(tmp_path: Path) -> None:
    given, _ = case("059")
    with pytest.raises(ValueError, match=r"not a finite|Expecting value"):
        loads_strict(given["current"])
    path = tmp_path / "base.json"
    path.write_text(given["current"])
    with pytest.raises(BaselineProblem, match=r"base\.json"):
        read(path, CATALOGUE)
    for value in (float("nan"), float("inf")):
        assert against("ttft_ms_p50", given["baseline"]["mean_ttft_ms"], value).verdict is Verdict.INVALID


def test_061_a_pin_does_not_follow_a_slow_drift() -> None:
    given, wanted = case("061")
    series, tau = given["series_ttft_ms"], given["threshold"]
    # the case's 5 % is that of output_tps; as cost per token, so that the same numbers are worse as they grow
    pinned = [against("output_tps", 1e5 / series[0], 1e5 / value).verdict for value in series]
    assert CATALOGUE["output_tps"].tau == tau
    assert (
        next(i for i, v in enumerate(pinned) if v is Verdict.SUSPECT) == wanted["pinned"]["first_red_index"]
    )
    assert all(verdict is Verdict.SUSPECT for verdict in pinned[wanted["pinned"]["first_red_index"] :])
    stale = against("ttft_ms_p50", given["stale"]["baseline"], given["stale"]["current"])
    assert "baseline stale" in stale.rows[0].note and "0.122" in stale.rows[0].note


def test_062_units_and_directions() -> None:
    rows = case("062")[0]["rows"]
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
    assert [one.rows[0].change for one in verdicts[2:]] == pytest.approx([0.40, -2 / 3, -0.40])
    assert "--update-baselines=tighten" in verdicts[4].rows[0].note


def test_064_what_makes_numbers_incomparable() -> None:
    given, wanted = case("064")
    fields = set(BaselineKey.model_fields)
    assert wanted["gpu"] == wanted["transport"] == "not comparable" and {"gpu", "gpu_count", "link"} <= fields
    assert "comparable" in wanted["version"] and not {"engine_version", "host", "driver"} & fields
    other = KEY.model_copy(update={"gpu": given["runs"]["gpu"]["gpu"]})
    assert KEY.digest != other.digest and "H200" in "".join(other.differences(KEY))
