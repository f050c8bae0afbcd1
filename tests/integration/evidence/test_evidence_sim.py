"""Proof against live engines: healthy, bypassed, recomputing, failing, leaking and restarted ones."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from pytest_pdperf.evidence.drain import wait_drained
from pytest_pdperf.evidence.exposition import Snapshot, Unknown
from pytest_pdperf.evidence.record import Evidence, Expected, Status
from pytest_pdperf.evidence.scrape import scrape
from pytest_pdperf.evidence.ttft_split import TtftSplit, split_ttft
from pytest_pdperf.evidence.verdict import judge_evidence
from pytest_pdperf.spec.topology import Role

PROMPT, OUTPUT, REQUESTS = 64, 4, 6
ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
REMOTE = {"do_remote_decode": True, "do_remote_prefill": False}
Pages = dict[str, Snapshot | Unknown]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Engines:
    """One prefill engine and some decode engines, each a process of its own, driven as the router would."""

    def __init__(self, folder: Path, faults: dict[str, str]) -> None:
        self.folder = folder
        self.faults = faults
        self.side, *ports = free_ports(len(faults) + 2)
        self.urls = {
            name: f"http://127.0.0.1:{port}" for name, port in zip(("prefill-0", *faults), ports, strict=True)
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.client = httpx.Client(timeout=20, trust_env=False)
        self.salt = 0

    def spawn(self, name: str) -> None:
        role = Role.PREFILL if name == "prefill-0" else Role.DECODE
        argv = [sys.executable, "-m", "pytest_pdperf.engines.sim.server", "--role", role.value]
        argv += [
            "--port",
            self.urls[name].rpartition(":")[2],
            "--served-model-name",
            "m",
            "--profile",
            "fast",
        ]
        argv += ["--side-channel-port", str(self.side)] if role is Role.PREFILL else []
        argv += ["--faults", self.faults.get(name, "")]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(argv, stdout=log, stderr=log)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 90
        for name, process in self.processes.items():
            while not self._ready(name):
                assert process.poll() is None, (self.folder / f"{name}.log").read_text()
                assert time.monotonic() < deadline, f"{name} did not start"
                time.sleep(0.05)

    def _ready(self, name: str) -> bool:
        try:
            return self.client.get(f"{self.urls[name]}/health").status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def pair(self, decode: str) -> dict[str, str]:
        return {"prefill-0": self.urls["prefill-0"], "decode-0": self.urls[decode]}

    def body(self, tokens: int, params: object = None) -> dict[str, object]:
        prompt = [100 + (self.salt * 7 + i) % 900 for i in range(PROMPT)]
        body: dict[str, object] = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body["ignore_eos"] = True
        return body if params is None else {**body, "kv_transfer_params": params}

    def request(self, decode: str, *, pass_params: bool = True, prefill: bool = True) -> int:
        self.salt += 1
        params: object = None
        if prefill:
            answer = self.client.post(f"{self.urls['prefill-0']}/v1/completions", json=self.body(1, REMOTE))
            assert answer.status_code == 200, answer.text
            params = answer.json()["kv_transfer_params"] if pass_params else None
        url = f"{self.urls[decode]}/v1/completions"
        return self.client.post(url, json=self.body(OUTPUT, params)).status_code

    def cell(self, decode: str, *, pass_params: bool = True, prefill: bool = True) -> Cell:
        urls = self.pair(decode)
        before = scrape(urls, 10.0)
        status = [self.request(decode, pass_params=pass_params, prefill=prefill) for _ in range(REQUESTS)]
        after = dict(wait_drained(urls, 1.0, before=before, poll_s=0.05).snapshots)
        expected = Expected(REQUESTS, REQUESTS * PROMPT, REQUESTS * OUTPUT)
        return Cell(before, after, judge_evidence("pd", before, after, expected, ROLES), status)


class Cell(NamedTuple):
    """What one cell left behind."""

    before: Pages
    after: Pages
    found: Evidence
    status: list[int]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    faults = {
        "healthy": "",
        "recomputing": "recompute=every:2",
        "failing": "transfer_fail=every:3",
        "leaking": "leak=1.0",
    }
    started = Engines(tmp_path_factory.mktemp("engines"), faults)
    try:
        for name in started.urls:
            started.spawn(name)
        started.wait_ready()
        yield started
    finally:
        for name in list(started.processes):
            started.stop(name)
        started.client.close()


def test_a_healthy_pair_is_proven(engines: Engines) -> None:
    before, after, found, status = engines.cell("healthy")
    assert set(status) == {200}
    assert found.status is Status.PROVEN, found
    assert (found.problems, found.leak, found.retries) == ((), False, 0)
    assert (found.recomputed_tokens, found.transferred_tokens) == (0, REQUESTS * PROMPT)
    assert found.transfers == REQUESTS
    assert found.transfer_bytes
    assert found.wall_rate
    split = split_ttft("pd", before, after, ROLES, measured_ttft_ms=1000.0, requests=REQUESTS)
    assert isinstance(split, TtftSplit)
    stages = {
        name: split.stages[name] for name in ("prefill_queue", "prefill", "transfer", "first_decode_step")
    }
    assert all(value is not None and value >= 0 for value in stages.values()), stages
    assert split.stages["prefill"]


def test_requests_that_skip_prefill_are_bypassed(engines: Engines) -> None:
    found, status = engines.cell("healthy", prefill=False)[2:]
    assert set(status) == {200}
    assert found.status is Status.BYPASSED
    assert found.proven_requests == 0
    assert found.prefill_imbalance is None


def test_every_second_request_recomputed_is_partial(engines: Engines) -> None:
    found = engines.cell("recomputing").found
    assert found.status is Status.PARTIAL, found
    assert found.summary == "partial: 3 of 6 by tokens (recompute share 0.5)"
    assert not found.valid


def test_failed_transfers_are_counted_and_blamed(engines: Engines) -> None:
    found, status = engines.cell("failing")[2:]
    assert status.count(500) == 2
    assert found.failed_transfers
    assert any("failed KV transfers" in problem for problem in found.problems)
    assert not found.valid


def test_blocks_that_stay_behind_are_a_leak(engines: Engines) -> None:
    found = engines.cell("leaking").found
    assert found.leak is True
    assert any("decode-0 is not idle" in problem for problem in found.problems)


def test_an_engine_that_came_back_in_the_window_or_is_gone_proves_nothing(engines: Engines) -> None:
    urls = engines.pair("healthy")
    before = scrape(urls, 10.0)
    assert engines.request("healthy") == 200
    engines.stop("healthy")
    gone = judge_evidence("pd", before, scrape(urls, 10.0), Expected(1, PROMPT), ROLES)
    assert gone.status is Status.UNKNOWN
    assert any("decode-0: no page after the window" in reason for reason in gone.reasons)
    engines.spawn("healthy")
    engines.wait_ready()
    assert engines.request("healthy") == 200
    back = judge_evidence("pd", before, scrape(urls, 10.0), Expected(2, 2 * PROMPT), ROLES)
    assert back.status is Status.UNKNOWN
    assert back.restarts
    assert back.restarts[0].startswith("decode-0")


def test_parameters_that_are_not_passed_on_make_decode_recompute(engines: Engines) -> None:
    """Every answer is 200 and right; only the counters tell, and prefill's blocks wait for their lease."""
    found, status = engines.cell("healthy", pass_params=False)[2:]
    assert set(status) == {200}
    assert found.status is Status.RECOMPUTED, found
    assert found.recomputed_tokens == REQUESTS * PROMPT
    assert found.leak is True
