"""What a simulated engine counts, under the names and labels of vLLM's /metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_TRANSFER_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5)
_BYTES = tuple(float(2 ** (11 + 2 * i)) for i in range(12))
_DESCRIPTORS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
_STEP_TOKENS = tuple(float(2**i) for i in (0, *range(3, 15)))
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)

FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
HIT_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


class Histogram:
    """A cumulative histogram whose observation costs one bisect: it sits on the token path."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Iterable[float]) -> None:
        self._bounds = tuple(float(b) for b in bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` as seen `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative buckets as Prometheus wants them."""
        rows: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            running += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), float(running)))
        return rows


class EngineMetrics:
    """All counters of one engine. Plain attributes, so counting is an addition; exposition happens on scrape."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.by_source: dict[str, int] = dict.fromkeys(PROMPT_SOURCES, 0)
        self.finished: dict[str, int] = dict.fromkeys(FINISHED_REASONS, 0)
        self.prefix_queries = 0
        self.external_queries = 0
        self.external_hits = 0
        self.failed_transfers = 0
        self.failed_notifications = 0
        self.kv_expired = 0
        self.notifications_after_expiry = 0
        self.transfer_time = Histogram(_TRANSFER_S)
        self.post_time = Histogram((0.001, *_TRANSFER_S))
        self.transfer_bytes = Histogram(_BYTES)
        self.descriptors = Histogram(_DESCRIPTORS)
        self.time_to_first_token = Histogram(_FIRST_TOKEN_S)
        self.inter_token = Histogram(_TOKEN_S)
        self.per_output_token = Histogram(_TOKEN_S)
        self.e2e = Histogram(_REQUEST_S)
        self.queue_time = Histogram(_REQUEST_S)
        self.inference_time = Histogram(_REQUEST_S)
        self.prefill_time = Histogram(_REQUEST_S)
        self.decode_time = Histogram(_REQUEST_S)
        self.iteration_tokens = Histogram(_STEP_TOKENS)
        self.request_prompt = Histogram(_TOKENS)
        self.request_generation = Histogram(_TOKENS)


class EngineCollector:
    """Turns the counters and the scheduler's state into metric families when someone scrapes."""

    def __init__(
        self,
        metrics: EngineMetrics,
        *,
        model_name: str,
        state: Callable[[], tuple[int, int, float]],
        cache_config: Mapping[str, str],
        transfers: bool,
        hit_source: str = "p2p",
    ) -> None:
        """`state` gives running requests, waiting requests and the share of KV in use; `transfers` adds NIXL's,
        `hit_source` is one of HIT_SOURCES."""
        self._metrics = metrics
        self._labels = {"engine": "0", "model_name": model_name}
        self._state = state
        self._cache_config = dict(cache_config)
        self._transfers = transfers
        self._hit_source = hit_source

    def collect(self) -> Iterable[Metric]:
        """All families of one scrape."""
        m = self._metrics
        running, waiting, usage = self._state()
        simulated = GaugeMetricFamily(
            "pdperf_simulated", "1: these numbers come from a timing model, not from a GPU"
        )
        simulated.add_metric([], 1.0)
        yield simulated
        yield self._gauge("num_requests_running", {"": running})
        yield self._gauge("num_requests_waiting", {"": waiting})
        yield self._gauge("kv_cache_usage_perc", {"": usage})
        yield self._counter("prefix_cache_queries", {"": m.prefix_queries})
        yield self._counter("prefix_cache_hits", {"": 0})
        yield self._counter("external_prefix_cache_queries", {"": m.external_queries})
        yield self._counter("external_prefix_cache_hits", {"": m.external_hits})
        yield self._counter("num_preemptions", {"": 0})
        yield self._counter("prompt_tokens", {"": m.prompt_tokens})
        yield self._counter("prompt_tokens_by_source", m.by_source, "source")
        yield self._counter("prompt_tokens_cached", {"": m.by_source["external_kv_transfer"]})
        hits = {**dict.fromkeys(HIT_SOURCES, 0), self._hit_source: m.by_source["external_kv_transfer"]}
        yield self._counter("prompt_tokens_cached_by_source", hits, "source")
        yield self._counter("generation_tokens", {"": m.generation_tokens})
        yield self._counter("request_success", m.finished, "finished_reason")
        for name, histogram in (
            ("time_to_first_token_seconds", m.time_to_first_token),
            ("inter_token_latency_seconds", m.inter_token),
            ("request_time_per_output_token_seconds", m.per_output_token),
            ("e2e_request_latency_seconds", m.e2e),
            ("request_queue_time_seconds", m.queue_time),
            ("request_inference_time_seconds", m.inference_time),
            ("request_prefill_time_seconds", m.prefill_time),
            ("request_decode_time_seconds", m.decode_time),
            ("iteration_tokens_total", m.iteration_tokens),
            ("request_prompt_tokens", m.request_prompt),
            ("request_generation_tokens", m.request_generation),
        ):
            yield self._histogram(name, histogram)
        if self._transfers:
            for name, histogram in (
                ("nixl_xfer_time_seconds", m.transfer_time),
                ("nixl_post_time_seconds", m.post_time),
                ("nixl_bytes_transferred", m.transfer_bytes),
                ("nixl_num_descriptors", m.descriptors),
            ):
                yield self._histogram(name, histogram)
            yield self._counter("nixl_num_failed_transfers", {"": m.failed_transfers})
            yield self._counter("nixl_num_failed_notifications", {"": m.failed_notifications})
            yield self._counter("nixl_num_kv_expired_reqs", {"": m.kv_expired})
            yield self._counter("nixl_num_notifications_after_expiry", {"": m.notifications_after_expiry})
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "KV cache of the simulated engine",
            labels=["engine", *self._cache_config],
        )
        config.add_metric(["0", *self._cache_config.values()], 1.0)
        yield config

    def _gauge(self, name: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", f"{name} (simulated)", labels=[*self._labels])
        for value in values.values():
            family.add_metric([*self._labels.values()], float(value))
        return family

    def _counter(self, name: str, values: Mapping[str, float], label: str = "") -> Metric:
        labels = [*self._labels, label] if label else [*self._labels]
        family = CounterMetricFamily(f"vllm:{name}", f"{name} (simulated)", labels=labels)
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *([key] if label else [])], float(value))
        return family

    def _histogram(self, name: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", f"{name} (simulated)", labels=[*self._labels])
        family.add_metric([*self._labels.values()], histogram.buckets(), sum_value=histogram.total)
        return family


def exposition(collector: EngineCollector) -> Callable[[], bytes]:
    """A function that renders one scrape, the process's own metrics included."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)
    return lambda: generate_latest(registry)
