"""The exposition: names and labels of vLLM's, values of ours, and a mark that it is simulated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pytest_pdperf.engines.sim.metrics import EngineCollector, EngineMetrics, Histogram, exposition

NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "prompt_tokens_by_source_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_sum",
    "request_time_per_output_token_seconds_count",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_sum",
    "request_inference_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "iteration_tokens_total_count",
    "request_prompt_tokens_sum",
    "request_generation_tokens_sum",
    "cache_config_info",
)
"""As vLLM 0.26 and 0.32 name them."""

NIXL_NAMES = (
    "nixl_xfer_time_seconds_sum",
    "nixl_post_time_seconds_count",
    "nixl_bytes_transferred_sum",
    "nixl_num_descriptors_bucket",
    "nixl_num_failed_transfers_total",
    "nixl_num_failed_notifications_total",
    "nixl_num_kv_expired_reqs_total",
)


def render(metrics: EngineMetrics, *, transfers: bool = True) -> Callable[[], bytes]:
    collector = EngineCollector(
        metrics,
        model_name="m",
        state=lambda: (3, 2, 0.25),
        cache_config={"block_size": "16"},
        transfers=transfers,
    )
    return exposition(collector)


def samples(page: bytes) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def test_all_names_are_there_with_vllms_labels() -> None:
    found = samples(render(EngineMetrics())())
    for name in [*NAMES, *NIXL_NAMES]:
        rows = found[f"vllm:{name}"]
        for labels, _ in rows:
            assert labels["engine"] == "0"
            if name != "cache_config_info":
                assert labels["model_name"] == "m"
    assert found["pdperf_simulated"] == [({}, 1.0)]
    assert found["process_start_time_seconds"][0][1] > 1e9
    assert {labels["finished_reason"] for labels, _ in found["vllm:request_success_total"]} >= {
        "length",
        "error",
        "abort",
    }
    assert {labels["source"] for labels, _ in found["vllm:prompt_tokens_by_source_total"]} == {
        "local_compute",
        "local_cache_hit",
        "external_kv_transfer",
    }


def test_an_engine_without_connector_has_no_nixl_series() -> None:
    found = samples(render(EngineMetrics(), transfers=False)())
    assert not [name for name in found if "nixl" in name]


def test_values_appear_on_the_next_scrape() -> None:
    metrics = EngineMetrics()
    scrape = render(metrics)
    assert samples(scrape())["vllm:generation_tokens_total"][0][1] == 0
    metrics.generation_tokens += 7
    metrics.by_source["external_kv_transfer"] += 100
    metrics.finished["error"] += 2
    metrics.failed_transfers += 3
    metrics.inter_token.observe(0.02, 5)
    found = samples(scrape())
    assert found["vllm:generation_tokens_total"][0][1] == 7
    assert ({"engine": "0", "model_name": "m", "source": "external_kv_transfer"}, 100.0) in found[
        "vllm:prompt_tokens_by_source_total"
    ]
    assert ({"engine": "0", "model_name": "m", "finished_reason": "error"}, 2.0) in found[
        "vllm:request_success_total"
    ]
    assert found["vllm:nixl_num_failed_transfers_total"][0][1] == 3
    assert found["vllm:inter_token_latency_seconds_count"][0][1] == 5
    assert found["vllm:inter_token_latency_seconds_sum"][0][1] == pytest.approx(0.1)
    assert found["vllm:num_requests_running"][0][1] == 3
    assert found["vllm:num_requests_waiting"][0][1] == 2
    assert found["vllm:kv_cache_usage_perc"][0][1] == 0.25


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), max_size=50))
def test_buckets_count_what_is_at_most_their_bound(values: list[tuple[float, int]]) -> None:
    bounds = (0.5, 1.0, 10.0)
    histogram = Histogram(bounds)
    for value, times in values:
        histogram.observe(value, times)
    rows = histogram.buckets()
    assert [row[0] for row in rows] == ["0.5", "1.0", "10.0", "+Inf"]
    for bound, (_, counted) in zip((*bounds, float("inf")), rows, strict=True):
        assert counted == sum(times for value, times in values if value <= bound)
    assert histogram.count == sum(times for _, times in values)
    assert histogram.total == pytest.approx(sum(value * times for value, times in values))
