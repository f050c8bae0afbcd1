"""Simulated engines behind the real vllm-router: the NIXL flow, its evidence, and what a client sees."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from pytest_pdperf.engines.base import Programs
from tests.integration.sim.sim_processes import House, Process, body, free_ports, house, post, stream, until

pytestmark = pytest.mark.timeout(300)


@dataclass
class System:
    prefill: Process
    decodes: list[Process]
    aggregated: Process
    router: Process

    @property
    def engines(self) -> list[Process]:
        return [self.prefill, *self.decodes, self.aggregated]


def start_router(opened: House, prefill: Process, decodes: list[Process]) -> Process:
    program = Programs((Path(sys.prefix) / "bin", Path(sys.executable).parent)).find("vllm-router")
    if program is None:
        pytest.skip("vllm-router is not installed")
    port, metrics = free_ports(2)
    argv = [str(program), "--host", "127.0.0.1", "--port", str(port), "--vllm-pd-disaggregation"]
    argv += ["--kv-connector", "nixl", "--policy", "round_robin", "--prefill", prefill.url]
    for decode in decodes:
        argv += ["--decode", decode.url]
    argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    argv += ["--worker-startup-check-interval", "1"]
    router = opened.start(argv, "router", f"http://127.0.0.1:{port}")
    until(lambda: router.answers("/readiness"), "the router is ready")
    return router


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with house(tmp_path_factory.mktemp("sim")) as opened:
        prefill = opened.engine("prefill", wait=False)
        decodes = [opened.engine("decode", wait=False) for _ in range(2)]
        aggregated = opened.engine("server", wait=False)
        for process in (prefill, *decodes, aggregated):
            until(process.answers, "engines are healthy")
        yield System(prefill, decodes, aggregated, start_router(opened, prefill, decodes))


def prompt(seed: int, length: int = 300) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(150_000) for _ in range(length)]


def test_streams_have_the_planned_length_and_the_tokens_of_the_aggregated_engine(system: System) -> None:
    def one(seed: int) -> None:
        request = body(prompt(seed), 12)
        through = stream(system.router.url, request)
        assert through.status == 200
        assert through.done
        assert through.error is None
        assert through.finish == "length"
        assert dict(through.usage) == {"prompt_tokens": 300, "total_tokens": 312, "completion_tokens": 12}
        assert len(through.tokens) == 12
        assert through.tokens == stream(system.aggregated.url, request).tokens
        assert "___prefill_addr_" in str(through.events[0]["id"])
        assert through.choices[0]["prompt_token_ids"] == prompt(seed)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(16)))


def test_different_prompts_give_different_tokens(system: System) -> None:
    changed = [*prompt(1)[:-1], 7]
    assert (
        stream(system.router.url, body(prompt(1), 8)).tokens
        != stream(system.router.url, body(changed, 8)).tokens
    )


def test_the_counters_prove_the_transfer(system: System) -> None:
    before = [engine.metrics() for engine in system.engines]
    for seed in range(20, 28):
        assert stream(system.router.url, body(prompt(seed, 200), 5)).finish == "length"
    after = [engine.metrics() for engine in system.engines]
    deltas = [{k: b[k] - a.get(k, 0.0) for k in b} for a, b in zip(before, after, strict=True)]
    prefill, decodes = deltas[0], deltas[1:3]
    assert prefill["prompt_tokens_by_source_total{source=local_compute}"] == 1600
    assert prefill["request_success_total{finished_reason=length}"] == 8
    for decode in decodes:
        assert decode["prompt_tokens_by_source_total{source=external_kv_transfer}"] == 800
        assert decode["prompt_tokens_by_source_total{source=local_compute}"] == 0
        assert (
            decode["external_prefix_cache_hits_total"] == decode["external_prefix_cache_queries_total"] == 800
        )
        assert decode["request_success_total{finished_reason=length}"] == 4, "round robin"
        assert decode["generation_tokens_total"] == 20
        assert decode["nixl_xfer_time_seconds_count"] == 4
        assert decode["nixl_bytes_transferred_sum"] == 800 * 262_144
        assert decode["nixl_num_failed_transfers_total"] == 0
        assert decode["inter_token_latency_seconds_count"] == 16
        assert decode["time_to_first_token_seconds_count"] == 4
    assert deltas[3]["prompt_tokens_total"] == 0, "the aggregated engine had no part in it"


def test_idle_engines_hold_no_blocks(system: System) -> None:
    stream(system.router.url, body(prompt(40), 4))

    def drained() -> bool:
        pages = [engine.metrics() for engine in system.engines]
        names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
        return all(page[name] == 0 for page in pages for name in names)

    until(drained, "all blocks are released")


def test_each_decode_engine_shakes_hands_once(system: System) -> None:
    for seed in range(50, 54):
        stream(system.router.url, body(prompt(seed), 2))
    for decode in system.decodes:
        assert decode.text().count("NIXL compatibility check passed") == 1


def test_chat_opens_with_a_role_and_counts_its_usage(system: System) -> None:
    request = body("unused", 5) | {"messages": [{"role": "user", "content": "one two three"}]}
    del request["prompt"]
    answer = stream(system.router.url, request, "/v1/chat/completions")
    assert answer.done
    first, *rest = answer.choices
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert "token_ids" not in first
    assert len(rest) == 5
    assert all(choice["delta"]["content"].startswith(" t") for choice in rest)
    assert answer.usage["completion_tokens"] == 5
    assert answer.usage["prompt_tokens"] == 5  # <|user|> one two three <|assistant|>


def test_an_answer_that_is_not_streamed(system: System) -> None:
    request = body(prompt(60), 6)
    answer = post(system.router.url, request).json()
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["choices"][0]["token_ids"] == stream(system.aggregated.url, request).tokens
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["kv_transfer_params"] is None


def test_a_client_that_leaves_frees_everything(system: System) -> None:
    request = body(prompt(70, 2000), 4000, stream=True)
    before = [decode.metrics()["request_success_total{finished_reason=abort}"] for decode in system.decodes]
    with httpx.stream(
        "POST", system.router.url + "/v1/completions", json=request, timeout=60, trust_env=False
    ) as answer:
        lines = answer.iter_lines()
        for _ in range(5):
            next(lines)

    def let_go() -> bool:
        pages = [engine.metrics() for engine in (system.prefill, *system.decodes)]
        aborted = [page["request_success_total{finished_reason=abort}"] for page in pages[1:]]
        return sum(aborted) == sum(before) + 1 and all(page["kv_cache_usage_perc"] == 0 for page in pages)

    until(let_go, "the decode engine has aborted and no engine holds blocks")


def test_the_router_passes_refusals_on(system: System) -> None:
    long = post(system.aggregated.url, body(prompt(1, 16_000), 1000))
    assert long.status_code == 400
    assert "maximum context length is 16384" in long.json()["error"]["message"]
    through = post(system.router.url, body(prompt(1, 16_000), 1000))
    assert through.status_code >= 400
