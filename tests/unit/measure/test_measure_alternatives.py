"""Other tools' numbers from our records: what they call TPOT and ITL, and what may be compared with what."""

from __future__ import annotations

import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.measure.alternatives import TOOLS, comparable, populations, recompute, tpot_of_whole_ms
from pytest_pdperf.measure.records import Status
from pytest_pdperf.measure.table import METRICS
from tests.unit.measure.measure_records import records, request


def test_three_numbers_called_tpot() -> None:
    """TTFT 900 ms, last token 1890, end 1900, 100 tokens: 10, 18.9 and 19 ms."""
    made = request([900.0 + 10 * i for i in range(100)], end_ms=1900)
    run = records([made])
    assert recompute(run, "vllm")["median_tpot_ms"].value == pytest.approx(10)
    assert recompute(run, "guidellm")["median_time_per_output_token_ms"].value == pytest.approx(18.9)
    assert recompute(run, "guidellm")["median_inter_token_latency_ms"].value == pytest.approx(10)
    assert recompute(run, "guidellm")["median_request_latency_ms"].value == pytest.approx(1900)
    assert tpot_of_whole_ms(made) == pytest.approx(19)


def test_sglang_counts_up_to_the_end_of_the_stream() -> None:
    """TTFT 900 ms, last token 1890, end 1900, 100 tokens: latency 1900 and (1900 - 900) / 99."""
    run = records([request([900.0 + 10 * i for i in range(100)], end_ms=1900)])
    found = recompute(run, "sglang")
    assert found["median_e2e_latency_ms"].value == pytest.approx(1900)
    assert found["median_tpot_ms"].value == pytest.approx(1000 / 99)
    assert comparable("tpot_ms", "sglang", "tpot_ms")
    assert comparable("e2e_ms", "sglang", "e2e_latency_ms")
    assert recompute(records([request([5.0], end_ms=9)]), "sglang")["median_tpot_ms"].value is None


def test_pooled_gaps_or_request_means() -> None:
    made = []
    for gaps in ([10.0] * 99 + [500.0], [10.0] * 100, [10.0] * 9):
        events = [100.0]
        for gap in gaps:
            events.append(events[-1] + gap)
        made.append(request(events))
    found = recompute(records(made), "aiperf")
    assert found["p99_inter_chunk_latency"].value == pytest.approx(10)
    assert found["mean_inter_chunk_latency"].value == pytest.approx(12.3445, abs=1e-4)
    assert found["p99_inter_token_latency"].value == pytest.approx(14.802)
    assert found["mean_inter_token_latency"].value == pytest.approx(11.6333, abs=1e-4)
    assert (found["p99_inter_chunk_latency"].n, found["p99_inter_token_latency"].n) == (209, 3)


def test_sglang_splits_gaps_over_tokens() -> None:
    run = records([request([60, 90, 120, 160], tokens=[1, 3, 2, 4])])
    assert recompute(run, "sglang")["mean_itl_ms"].value == pytest.approx(100 / 9)
    assert recompute(run, "vllm")["mean_itl_ms"].value == pytest.approx(100 / 3)
    unknown = records([request([60, 90], tokens=[0, 0], count=7)])
    assert recompute(unknown, "sglang")["mean_itl_ms"].value == pytest.approx(30)


def test_rates_and_failures() -> None:
    run = records([request([100, 200]), request([50, 400], status=Status.SHORT), request([9], warmup=True)])
    found = recompute(run, "vllm")
    assert found["output_throughput"].value == pytest.approx(2 / 0.4)
    assert found["request_throughput"].value == pytest.approx(1 / 0.4)
    assert found["median_ttft_ms"].n == 1
    empty = recompute(records([]), "vllm")
    assert {v.value for v in empty.values()} == {None}


@pytest.mark.parametrize("tool", TOOLS)
def test_claims_of_equality_point_at_the_table(tool: str) -> None:
    stems = {name.rpartition("_")[0] for name in METRICS}
    for population in populations(tool):
        assert population.ours is None or population.ours in stems


def test_comparing_across_definitions_is_refused() -> None:
    assert comparable("tpot_ms", "vllm", "tpot_ms") == ""
    assert comparable("itl_ms", "aiperf", "inter_chunk_latency") == ""
    assert "holds the TTFT" in comparable("tpot_ms", "guidellm", "time_per_output_token_ms")
    assert comparable("itl_ms", "aiperf", "inter_token_latency")
    assert comparable("itl_ms", "sglang", "itl_ms")
    with pytest.raises(UsageProblem, match="did you mean 'inter_token_latency'"):
        comparable("itl_ms", "aiperf", "inter_token_latencies")


def test_unknown_tool() -> None:
    with pytest.raises(
        UsageProblem, match=r"want one of vllm, sglang, aiperf, guidellm; did you mean 'vllm'"
    ):
        recompute(records([]), "vlm")
