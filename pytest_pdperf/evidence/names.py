"""Engines rename metrics between versions: the one table that maps every known name to what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from .deltas import Join, Ranks

MIB = 1024.0 * 1024.0


class Quantity(StrEnum):
    """What the suite wants to know of an engine, whatever the engine calls it."""

    REQUESTS_FINISHED = "requests_finished"
    REQUESTS_FAILED = "requests_failed"
    """Finished with reason `error`."""
    REQUESTS_ABORTED = "requests_aborted"
    PROMPT_TOKENS = "prompt_tokens"
    PROMPT_TOKENS_COMPUTED = "prompt_tokens_computed"
    """Prefilled by this engine itself: source `local_compute`."""
    PROMPT_TOKENS_CACHED = "prompt_tokens_cached"
    """Found in this engine's own prefix cache: source `local_cache_hit`."""
    PROMPT_TOKENS_TRANSFERRED = "prompt_tokens_transferred"
    """KV loaded from another engine: source `external_kv_transfer`."""
    PROMPT_TOKENS_PEER = "prompt_tokens_peer"
    """The part of the transferred tokens that came from a peer, not from a host or disk tier (vLLM 0.32)."""
    PROMPT_TOKENS_UNTOLD = "prompt_tokens_untold"
    """The part of the transferred tokens whose connector does not say where they came from (vLLM 0.32)."""
    EXTERNAL_HITS = "external_hits"
    """Tokens found by asking the connector; the older way to see transferred tokens."""
    GENERATION_TOKENS = "generation_tokens"
    TRANSFERS = "transfers"
    TRANSFER_BYTES = "transfer_bytes"
    TRANSFER_SECONDS = "transfer_seconds"
    """Sum of the durations of single transfers: they overlap, so this is not wall time."""
    POST_SECONDS = "post_seconds"
    TRANSFER_RATE = "transfer_rate"
    """The engine's own claim, bytes per second of one transfer."""
    FAILED_TRANSFERS = "failed_transfers"
    FAILED_NOTIFICATIONS = "failed_notifications"
    FAILED_BOOTSTRAPS = "failed_bootstraps"
    EXPIRED_REQUESTS = "expired_requests"
    """Held KV blocks that were given up because nobody fetched them in time."""
    LATE_NOTIFICATIONS = "late_notifications"
    PREFILL_RETRIES = "prefill_retries"
    PREEMPTIONS = "preemptions"
    PREFIX_QUERIES = "prefix_queries"
    PREFIX_HITS = "prefix_hits"
    RUNNING = "running"
    WAITING = "waiting"
    KV_USAGE = "kv_usage"
    """Share of KV blocks in use, 0..1; blocks that are only cached count as free."""
    QUEUE_SECONDS = "queue_seconds"
    PREFILL_SECONDS = "prefill_seconds"
    DECODE_SECONDS = "decode_seconds"
    INTER_TOKEN_SECONDS = "inter_token_seconds"
    """From one token of a request to its next, as the engine times it."""
    INFERENCE_SECONDS = "inference_seconds"
    TTFT_SECONDS = "ttft_seconds"
    E2E_SECONDS = "e2e_seconds"
    HTTP_SECONDS = "http_seconds"
    """Of the API server: from a request's arrival to the end of its answer, parsing and tokenising included."""
    BOOTSTRAP_SECONDS = "bootstrap_seconds"
    TRANSFER_WAIT_SECONDS = "transfer_wait_seconds"
    """Decode side: from asking for the KV to having it."""


Kind = Literal["counter", "gauge", "histogram"]
Part = Literal["", "count", "sum"]


@dataclass(frozen=True, slots=True)
class Form:
    """One way an engine prints a quantity. `scale` turns its unit into ours (bytes, seconds, 0..1)."""

    engine: Literal["vllm", "sglang"]
    metric: str
    """Name on the wire; for histograms the base name."""
    kind: Kind
    part: Part = ""
    """Which sum of a histogram stands for the quantity when it is asked for as a number."""
    where: Mapping[str, str] = field(default_factory=dict)
    scale: float = 1.0
    ranks: Ranks = "copies"
    join: Join = "sum"
    lazy: bool = False
    """Printed only from the first increment on."""
    absent_label_is_zero: bool = False
    """The family is there without this label value: that is a zero, not a hole."""
    seen_in: str = ""
    """Versions in which the name was seen; for people, never compared."""


def _vllm(metric: str, kind: Kind = "counter", part: Part = "", **more: object) -> Form:
    return Form("vllm", f"vllm:{metric}", kind, part, **more)  # type: ignore[arg-type]


def _sglang(metric: str, kind: Kind = "counter", part: Part = "", **more: object) -> Form:
    return Form("sglang", f"sglang:{metric}", kind, part, lazy=True, **more)  # type: ignore[arg-type]


def _by_source(source: str) -> Form:
    return _vllm("prompt_tokens_by_source_total", where={"source": source}, seen_in="0.17 on (PR 33290)")


def _finished(reason: str) -> Form:
    return _vllm("request_success_total", where={"finished_reason": reason})


def _stage(stage: str) -> Form:
    return _sglang(
        "per_stage_req_latency_seconds", "histogram", "sum", where={"stage": stage}, seen_in="0.5.17"
    )


FORMS: Mapping[Quantity, tuple[Form, ...]] = {
    Quantity.REQUESTS_FINISHED: (_vllm("request_success_total"), _sglang("num_requests_total")),
    Quantity.REQUESTS_FAILED: (_finished("error"),),
    Quantity.REQUESTS_ABORTED: (_finished("abort"), _sglang("num_aborted_requests_total")),
    Quantity.PROMPT_TOKENS: (_vllm("prompt_tokens_total"), _sglang("prompt_tokens_total")),
    Quantity.PROMPT_TOKENS_COMPUTED: (
        _by_source("local_compute"),
        _sglang(
            "realtime_tokens_total",
            where={"mode": "prefill_compute"},
            absent_label_is_zero=True,
            seen_in="0.5.17",
        ),
    ),
    Quantity.PROMPT_TOKENS_CACHED: (
        _by_source("local_cache_hit"),
        _sglang("realtime_tokens_total", where={"mode": "prefill_cache"}, absent_label_is_zero=True),
        _sglang("cached_tokens_total"),
    ),
    Quantity.PROMPT_TOKENS_TRANSFERRED: (_by_source("external_kv_transfer"),),
    Quantity.PROMPT_TOKENS_PEER: (
        _vllm("prompt_tokens_cached_by_source_total", where={"source": "p2p"}, seen_in="0.32"),
    ),
    Quantity.PROMPT_TOKENS_UNTOLD: (
        _vllm(
            "prompt_tokens_cached_by_source_total",
            where={"source": "external_unspecified"},
            absent_label_is_zero=True,
            seen_in="0.32: ExampleConnector",
        ),
    ),
    Quantity.EXTERNAL_HITS: (_vllm("external_prefix_cache_hits_total"),),
    Quantity.GENERATION_TOKENS: (_vllm("generation_tokens_total"), _sglang("generation_tokens_total")),
    Quantity.TRANSFERS: (
        _vllm("nixl_xfer_time_seconds", "histogram", "count"),
        _sglang("kv_transfer_latency_ms", "histogram", "count"),
    ),
    Quantity.TRANSFER_BYTES: (
        _vllm("nixl_bytes_transferred", "histogram", "sum"),
        _sglang("kv_transfer_total_mb", "histogram", "sum", scale=MIB, seen_in="MB is MiB"),
    ),
    Quantity.TRANSFER_SECONDS: (
        _vllm("nixl_xfer_time_seconds", "histogram", "sum"),
        _sglang("kv_transfer_latency_ms", "histogram", "sum", scale=1e-3),
    ),
    Quantity.POST_SECONDS: (_vllm("nixl_post_time_seconds", "histogram", "sum"),),
    Quantity.TRANSFER_RATE: (
        _sglang("kv_transfer_speed_gb_s", "histogram", "sum", scale=1024.0 * MIB),
        _sglang(
            "kv_transfer_speed_gb_s",
            "gauge",
            scale=1024.0 * MIB,
            join="max",
            seen_in="before 0.5.10: last value",
        ),
    ),
    Quantity.FAILED_TRANSFERS: (
        _vllm("nixl_num_failed_transfers_total"),
        _sglang("num_transfer_failed_reqs_total"),
    ),
    Quantity.FAILED_NOTIFICATIONS: (_vllm("nixl_num_failed_notifications_total"),),
    Quantity.FAILED_BOOTSTRAPS: (_sglang("num_bootstrap_failed_reqs_total"),),
    Quantity.EXPIRED_REQUESTS: (_vllm("nixl_num_kv_expired_reqs_total"),),
    Quantity.LATE_NOTIFICATIONS: (_vllm("nixl_num_notifications_after_expiry_total", seen_in="0.32"),),
    Quantity.PREFILL_RETRIES: (_sglang("num_prefill_retries_total"),),
    Quantity.PREEMPTIONS: (_vllm("num_preemptions_total"), _sglang("num_retracted_requests_total")),
    Quantity.PREFIX_QUERIES: (
        _vllm("prefix_cache_queries_total"),
        _vllm("gpu_prefix_cache_queries_total", seen_in="before 0.10"),
        _sglang("prompt_tokens_total"),
    ),
    Quantity.PREFIX_HITS: (
        _vllm("prefix_cache_hits_total"),
        _vllm("gpu_prefix_cache_hits_total", seen_in="before 0.10"),
        _sglang("cached_tokens_total"),
        _sglang("realtime_tokens_total", where={"mode": "prefill_cache"}, absent_label_is_zero=True),
    ),
    Quantity.RUNNING: (_vllm("num_requests_running", "gauge"), _sglang("num_running_reqs", "gauge")),
    Quantity.WAITING: (_vllm("num_requests_waiting", "gauge"), _sglang("num_queue_reqs", "gauge")),
    Quantity.KV_USAGE: (
        _vllm("kv_cache_usage_perc", "gauge", join="max"),
        _vllm("gpu_cache_usage_perc", "gauge", join="max", seen_in="before 0.12"),
        _sglang("token_usage", "gauge", join="max"),
    ),
    Quantity.QUEUE_SECONDS: (
        _vllm("request_queue_time_seconds", "histogram", "sum"),
        _sglang("queue_time_seconds", "histogram", "sum"),
    ),
    Quantity.PREFILL_SECONDS: (
        _vllm("request_prefill_time_seconds", "histogram", "sum"),
        _stage("prefill_forward"),
    ),
    Quantity.DECODE_SECONDS: (_vllm("request_decode_time_seconds", "histogram", "sum"),),
    Quantity.INTER_TOKEN_SECONDS: (
        _vllm("inter_token_latency_seconds", "histogram", "sum"),
        _vllm("time_per_output_token_seconds", "histogram", "sum", seen_in="removed after 0.12"),
        _sglang("inter_token_latency_seconds", "histogram", "sum"),
    ),
    Quantity.INFERENCE_SECONDS: (_vllm("request_inference_time_seconds", "histogram", "sum"),),
    Quantity.TTFT_SECONDS: (
        _vllm("time_to_first_token_seconds", "histogram", "sum"),
        _sglang("time_to_first_token_seconds", "histogram", "sum"),
    ),
    Quantity.E2E_SECONDS: (
        _vllm("e2e_request_latency_seconds", "histogram", "sum"),
        _sglang("e2e_request_latency_seconds", "histogram", "sum"),
    ),
    Quantity.HTTP_SECONDS: (
        Form(
            "vllm", "http_request_duration_seconds", "histogram", "sum", where={"method": "POST"}, lazy=True
        ),
    ),
    Quantity.BOOTSTRAP_SECONDS: (
        _sglang("kv_transfer_bootstrap_ms", "histogram", "sum", scale=1e-3),
        _stage("prefill_bootstrap"),
    ),
    Quantity.TRANSFER_WAIT_SECONDS: (_stage("decode_transferred"),),
}

EXTRA_QUEUES: tuple[str, ...] = (
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_prefill_prealloc_queue_reqs",
    "sglang:num_prefill_inflight_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
)
"""Gauges of requests that wait for the other role; an engine is idle only when they are zero too."""
