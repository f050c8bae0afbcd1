"""What a simulated engine counts, under the names and labels of SGLang's /metrics, in its new and its old forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pytest_pdperf.spec.roles import Role

from .metrics import EngineMetrics, Histogram

_BOOTSTRAP_MS = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
_LATENCY_MS = (*_BOOTSTRAP_MS, 5000)
_MIB = (1, 5, 10, 50, 100, 500, 1000, 5000, 10000)
_GIB_S = (0.1, 0.5, 1, 5, 10, 25, 50, 100, 200, 400)
_STAGE_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_TTFT_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_E2E_S = (*_TTFT_S, 600, 1200, 1800, 2400)
_TOKEN_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
MIB = 1024.0 * 1024.0
ENGINE_TYPE: Mapping[Role, str] = {
    Role.PREFILL: "prefill",
    Role.DECODE: "decode",
    Role.SERVER: "unified",
}


class SglangMetrics(EngineMetrics):
    """All counters of one engine; the ones that SGLang alone has on top of the common ones."""

    def __init__(self) -> None:
        super().__init__()
        self.time_to_first_token = Histogram(_TTFT_S)
        self.e2e = Histogram(_E2E_S)
        self.inter_token = Histogram(_TOKEN_S)
        self.waited = Histogram(_STAGE_S)
        """Seconds in the scheduler's own queue: not, as `queue_time` has it, everything since the arrival."""
        self.prefill_computed = 0
        """Prompt tokens that this engine's own steps computed."""
        self.failed_bootstraps = 0
        self.bootstrap_ms = Histogram(_BOOTSTRAP_MS)
        self.alloc_ms = Histogram(_BOOTSTRAP_MS)
        self.latency_ms = Histogram(_LATENCY_MS)
        self.size_mib = Histogram(_MIB)
        self.speed_gib_s = Histogram(_GIB_S)
        self.last_latency_ms = 0.0
        self.last_speed_gib_s = 0.0
        self.stages: dict[str, Histogram] = {}
        self.requests = {"true": 0, "false": 0}
        """Finished requests by `is_streaming`; the two below likewise."""
        self.prompts = {"true": 0, "false": 0}
        self.outputs = {"true": 0, "false": 0}

    def finish(self, streamed: bool, prompt: int, output: int) -> None:
        """A request is over, after `prompt` and `output` tokens."""
        way = "true" if streamed else "false"
        self.requests[way] += 1
        self.prompts[way] += prompt
        self.outputs[way] += output

    def stage(self, name: str, seconds: float) -> None:
        """One request has been through a stage."""
        self.stages.setdefault(name, Histogram(_STAGE_S)).observe(max(0.0, seconds))

    def sent(self, seconds: float, size: int) -> None:
        """Prefill has sent `size` bytes of KV in `seconds`."""
        self.latency_ms.observe(seconds * 1e3)
        self.size_mib.observe(size / MIB)
        self.last_latency_ms = seconds * 1e3
        if seconds > 0:
            self.last_speed_gib_s = size / seconds / (1024 * MIB)
            self.speed_gib_s.observe(self.last_speed_gib_s)


@dataclass(frozen=True, slots=True)
class Levels:
    """What a scrape finds at the moment: requests in each queue, and KV in use."""

    running: int
    queued: int
    usage: float
    bootstrapping: int = 0
    inflight: int = 0
    preallocating: int = 0
    transferring: int = 0


class SglangCollector:
    """Turns the counters and the levels into metric families when someone scrapes.

    `old` prints what SGLang printed before 0.5.10: speed and latency of transfers as gauges of the last value, and
    labels without ranks but `tp_rank`.
    """

    def __init__(
        self,
        metrics: SglangMetrics,
        *,
        role: Role,
        model_name: str,
        levels: Callable[[], Levels],
        total_tokens: int,
        page_size: int,
        context_len: int,
        old: bool,
    ) -> None:
        self._metrics = metrics
        self._role = role
        self._model = {"engine_type": ENGINE_TYPE[role], "model_name": model_name}
        ranks = {"tp_rank": "0"} if old else {"moe_ep_rank": "0", "pp_rank": "0", "tp_rank": "0"}
        self._rank = self._model | ranks
        self._levels = levels
        self._total_tokens = total_tokens
        self._page_size = page_size
        self._context_len = context_len
        self._old = old

    def collect(self) -> Iterable[Metric]:
        """All families of one scrape. Families with labels appear, as with the real client, when first counted."""
        simulated = GaugeMetricFamily(
            "pdperf_simulated", "1: these numbers come from a timing model, not from a GPU"
        )
        simulated.add_metric([], 1.0)
        yield simulated
        yield from self._gauges(self._levels())
        yield from self._counters()
        m = self._metrics
        if m.stages:
            yield self._histogram("per_stage_req_latency_seconds", m.stages, label="stage", labels=self._rank)
        served = self._role is not Role.PREFILL
        for name, histogram, labels, wanted in (
            ("queue_time_seconds", m.waited, self._rank, True),
            ("kv_transfer_bootstrap_ms", m.bootstrap_ms, self._rank, self._role is not Role.SERVER),
            ("kv_transfer_alloc_ms", m.alloc_ms, self._rank, self._role is not Role.SERVER),
            ("kv_transfer_latency_ms", m.latency_ms, self._rank, not self._old),
            ("kv_transfer_speed_gb_s", m.speed_gib_s, self._rank, not self._old),
            ("kv_transfer_total_mb", m.size_mib, self._rank, True),
            ("inter_token_latency_seconds", m.inter_token, self._model, served),
            ("time_to_first_token_seconds", m.time_to_first_token, self._model, served),
            ("e2e_request_latency_seconds", m.e2e, self._model, served),
            ("prompt_tokens_histogram", m.request_prompt, self._model, True),
            ("generation_tokens_histogram", m.request_generation, self._model, True),
        ):
            if wanted and histogram.count:
                yield self._histogram(name, {"": histogram}, labels=labels)

    def _gauges(self, levels: Levels) -> Iterator[Metric]:
        m = self._metrics
        for name, value in (
            ("num_running_reqs", levels.running),
            ("num_queue_reqs", levels.queued),
            ("token_usage", levels.usage),
            ("num_used_tokens", round(levels.usage * self._total_tokens)),
            ("num_prefill_bootstrap_queue_reqs", levels.bootstrapping),
            ("num_prefill_inflight_queue_reqs", levels.inflight),
            ("num_decode_prealloc_queue_reqs", levels.preallocating),
            ("num_decode_transfer_queue_reqs", levels.transferring),
            ("max_total_num_tokens", self._total_tokens),
            ("page_size", self._page_size),
            ("num_pages", self._total_tokens // self._page_size),
            ("context_len", self._context_len),
            ("cache_hit_rate", 0.0),
            ("utilization", -1.0),
            ("fwd_occupancy", math.nan),
        ):
            yield self._gauge(name, value)
        if self._old and m.latency_ms.count:
            yield self._gauge("kv_transfer_latency_ms", m.last_latency_ms)
            yield self._gauge("kv_transfer_speed_gb_s", m.last_speed_gib_s)

    def _counters(self) -> Iterator[Metric]:
        m = self._metrics
        modes = {"prefill_compute": m.prefill_computed, "decode": m.generation_tokens}
        if self._role is Role.PREFILL:
            del modes["decode"]
        yield self._counter("realtime_tokens", modes, self._rank, "mode")
        for name, values in (
            ("num_requests", m.requests),
            ("prompt_tokens", m.prompts),
            ("generation_tokens", m.outputs),
        ):
            yield self._counter(name, values, self._model, "is_streaming")
        yield self._counter("num_aborted_requests", {"": m.finished["abort"]}, self._model)
        yield self._counter("num_bootstrap_failed_reqs", {"": m.failed_bootstraps}, self._rank)
        yield self._counter("num_transfer_failed_reqs", {"": m.failed_transfers}, self._rank)

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"sglang:{name}", f"{name} (simulated)", labels=[*self._rank])
        family.add_metric([*self._rank.values()], float(value))
        return family

    def _counter(
        self, name: str, values: Mapping[str, float], labels: Mapping[str, str], label: str = ""
    ) -> Metric:
        names = [*labels, label] if label else [*labels]
        family = CounterMetricFamily(f"sglang:{name}", f"{name} (simulated)", labels=names)
        for key, value in values.items():
            if value:
                family.add_metric([*labels.values(), *([key] if label else [])], float(value))
        return family

    def _histogram(
        self, name: str, values: Mapping[str, Histogram], *, labels: Mapping[str, str], label: str = ""
    ) -> Metric:
        names = [*labels, label] if label else [*labels]
        family = HistogramMetricFamily(f"sglang:{name}", f"{name} (simulated)", labels=names)
        for key, histogram in values.items():
            row = [*labels.values(), *([key] if label else [])]
            family.add_metric(row, histogram.buckets(), sum_value=histogram.total)
        return family


def exposition(collector: SglangCollector) -> Callable[[], bytes]:
    """A function that renders one scrape. No process metrics: SGLang's page comes from several processes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return lambda: generate_latest(registry)
