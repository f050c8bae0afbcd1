"""Mooncake's two legs between simulated processes: either may come first."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.integration.sim.sim_processes import House, Process, body, free_ports, house, post, stream, until

PROMPT = list(range(100, 164))


class Pair:
    """A prefill and a decode engine, and the two legs that a router would send."""

    def __init__(self, opened: House) -> None:
        (port,) = free_ports(1)
        mooncake = ("--kv-connector", "mooncake")
        self.prefill = opened.engine(
            "prefill", *mooncake, "--bootstrap-port", str(port), "--kv-lease-s", "60", wait=False
        )
        self.decode = opened.engine("decode", *mooncake)
        until(self.prefill.answers, "prefill is healthy")
        self.bootstrap = f"http://127.0.0.1:{port}"
        found = httpx.get(f"{self.bootstrap}/query", timeout=20, trust_env=False).json()
        self.engine_id = found["0"]["engine_id"]

    def prefill_leg(self, transfer_id: str) -> None:
        """The leg that computes; its answer says nothing of the KV."""
        kv = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        answer = post(self.prefill.url, body(PROMPT, 1, kv_transfer_params=kv))
        assert answer.status_code == 200, answer.text
        assert answer.json()["kv_transfer_params"] is None

    def decode_body(self, transfer_id: str) -> dict[str, object]:
        """The leg that streams."""
        kv = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": self.bootstrap,
            "remote_engine_id": self.engine_id,
        }
        return body(PROMPT, 8, kv_transfer_params=kv)

    def idle(self, process: Process) -> bool:
        """No request and no KV is left."""
        found = process.metrics()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(found[name] for name in names)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with house(tmp_path_factory.mktemp("mooncake")) as opened:
        yield Pair(opened)


def test_decode_may_come_first_and_gets_what_an_engine_of_its_own_would_give(pair: Pair) -> None:
    with ThreadPoolExecutor(1) as side:
        early = side.submit(stream, pair.decode.url, pair.decode_body("early"))
        until(lambda: pair.decode.metrics()["num_requests_waiting"] == 1, "decode waits for its prefill")
        pair.prefill_leg("early")
        first = early.result()
    pair.prefill_leg("late")
    second = stream(pair.decode.url, pair.decode_body("late"))
    alone = stream(pair.decode.url, body(PROMPT, 8))
    assert first.error is second.error is None
    assert first.tokens == second.tokens == alone.tokens
    found = pair.decode.metrics()
    assert found["prompt_tokens_by_source_total{source=external_kv_transfer}"] == 2 * len(PROMPT)
    assert found["prompt_tokens_by_source_total{source=local_compute}"] == len(PROMPT)
    until(lambda: pair.idle(pair.prefill) and pair.idle(pair.decode), "both are idle")
