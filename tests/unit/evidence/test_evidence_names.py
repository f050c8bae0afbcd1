"""Every name an engine ever used means one thing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_pdperf.evidence.deltas import HistogramDelta
from pytest_pdperf.evidence.exposition import Snapshot, Unknown, parse_exposition
from pytest_pdperf.evidence.names import FORMS, Quantity
from pytest_pdperf.evidence.readings import change, engine_of, kv_block_share, level, observations

DATA = Path(__file__).parents[2] / "data" / "evidence"
SAMPLES = Path(__file__).parents[4] / "shared" / "samples"


def snap(text: str) -> Snapshot:
    page = parse_exposition(text)
    assert isinstance(page, Snapshot), page
    return page


def load(name: str) -> Snapshot:
    return snap((DATA / name).read_text())


def test_every_quantity_has_a_form_with_an_engine_prefix() -> None:
    assert set(FORMS) == set(Quantity)
    for quantity, forms in FORMS.items():
        assert forms, quantity
        for form in forms:
            assert form.metric.startswith(f"{form.engine}:") or quantity is Quantity.HTTP_SECONDS
            assert (form.kind == "histogram") == bool(form.part), form


def test_vllm_quantities_of_a_decode_engine() -> None:
    before, after = load("vllm_idle.prom"), load("vllm_decode.prom")
    assert engine_of(after) == "vllm"
    expected = {
        Quantity.REQUESTS_FINISHED: 10,
        Quantity.REQUESTS_FAILED: 0,
        Quantity.PROMPT_TOKENS: 40960,
        Quantity.PROMPT_TOKENS_COMPUTED: 0,
        Quantity.PROMPT_TOKENS_TRANSFERRED: 40960,
        Quantity.PROMPT_TOKENS_PEER: 40960,
        Quantity.GENERATION_TOKENS: 1280,
        Quantity.TRANSFERS: 20,
        Quantity.TRANSFER_BYTES: 20 * 32 * 1024 * 1024,
        Quantity.TRANSFER_SECONDS: pytest.approx(0.16),
        Quantity.POST_SECONDS: pytest.approx(0.04),
        Quantity.FAILED_TRANSFERS: 0,
        Quantity.EXPIRED_REQUESTS: 0,
        Quantity.PREFIX_QUERIES: 40960,
        Quantity.PREFIX_HITS: 0,
        Quantity.QUEUE_SECONDS: pytest.approx(0.18),
    }
    assert {quantity: change(before, after, quantity) for quantity in expected} == expected
    assert kv_block_share(after) == 0.001


def test_sglang_ranks_health_checks_and_units() -> None:
    before, after = snap("sglang:token_usage 0\n"), load("sglang_prefill.prom")
    assert engine_of(after) == "sglang"
    assert change(before, after, Quantity.TRANSFERS) == 4
    assert change(before, after, Quantity.TRANSFER_BYTES) == 4 * 64 * 1024 * 1024
    assert change(before, after, Quantity.TRANSFER_SECONDS) == pytest.approx(0.1)
    assert change(before, after, Quantity.REQUESTS_FINISHED) == 4
    assert change(before, after, Quantity.PROMPT_TOKENS_COMPUTED) == 4001
    decode = load("sglang_decode.prom")
    assert change(before, decode, Quantity.PROMPT_TOKENS_COMPUTED) == 0
    assert level(decode, Quantity.WAITING) == 0
    assert isinstance(change(before, decode, Quantity.TRANSFERS), Unknown)


def test_waiting_counts_the_queues_between_the_roles_and_priorities_once() -> None:
    page = snap(
        'sglang:num_queue_reqs{priority="",tp_rank="0"} 3\n'
        'sglang:num_queue_reqs{priority="1",tp_rank="0"} 3\n'
        'sglang:num_queue_reqs{priority="",tp_rank="1"} 3\n'
        'sglang:num_decode_transfer_queue_reqs{tp_rank="0"} 2\n'
        'sglang:num_decode_transfer_queue_reqs{tp_rank="1"} 2\n'
    )
    assert level(page, Quantity.WAITING) == 5


@pytest.mark.parametrize(
    ("old", "quantity", "value"),
    [
        ("vllm:gpu_cache_usage_perc 0.25\n", Quantity.KV_USAGE, 0.25),
        ("vllm:kv_cache_usage_perc 0.25\n", Quantity.KV_USAGE, 0.25),
        ("sglang:token_usage 0.5\n", Quantity.KV_USAGE, 0.5),
    ],
)
def test_old_names_of_gauges(old: str, quantity: Quantity, value: float) -> None:
    assert level(snap(old), quantity) == value


def test_old_names_of_prefix_counters() -> None:
    before = snap("vllm:gpu_prefix_cache_queries_total 10\nvllm:gpu_prefix_cache_hits_total 1\n")
    after = snap("vllm:gpu_prefix_cache_queries_total 30\nvllm:gpu_prefix_cache_hits_total 6\n")
    assert change(before, after, Quantity.PREFIX_QUERIES) == 20
    assert change(before, after, Quantity.PREFIX_HITS) == 5


def test_a_gauge_that_was_to_become_a_histogram_gives_no_delta() -> None:
    old = snap('# TYPE sglang:kv_transfer_speed_gb_s gauge\nsglang:kv_transfer_speed_gb_s{tp_rank="0"} 2.5\n')
    found = change(old, old, Quantity.TRANSFER_RATE)
    assert isinstance(found, Unknown)
    assert "last value only" in found.reason
    assert isinstance(observations(old, old, Quantity.TRANSFER_RATE), Unknown)
    new = observations(snap("sglang:token_usage 0\n"), load("sglang_prefill.prom"), Quantity.TRANSFER_RATE)
    assert isinstance(new, HistogramDelta)
    assert new.mean == 2.5 * 1024**3


def test_holes_name_the_metric_and_the_engine() -> None:
    page = snap("vllm:num_requests_running 0\n")
    for quantity in Quantity:
        if quantity is Quantity.RUNNING:
            continue
        found = change(page, page, quantity)
        assert isinstance(found, Unknown), quantity
        assert quantity.value in found.reason
    foreign = change(snap("go_goroutines 5\n"), snap("go_goroutines 5\n"), Quantity.TRANSFERS)
    assert isinstance(foreign, Unknown)
    assert "no known engine" in foreign.reason


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the shared samples are not beside this repository")
@pytest.mark.parametrize("name", ["vllm_metrics_decode.prom", "sglang_metrics_prefill.prom"])
def test_field_samples_parse(name: str) -> None:
    text = (SAMPLES / name).read_text()
    page = snap(text)
    if engine_of(page) == "vllm":
        assert level(page, Quantity.KV_USAGE) == 0.25
        assert change(snap(text.replace(" 20.0", " 0.0")), page, Quantity.TRANSFERS) == 20
    else:
        assert change(snap("sglang:x 0\n"), page, Quantity.FAILED_TRANSFERS) == 1
        assert change(snap("sglang:x 0\n"), page, Quantity.TRANSFER_SECONDS) == pytest.approx(0.25)
        assert level(page, Quantity.RUNNING) == 0
