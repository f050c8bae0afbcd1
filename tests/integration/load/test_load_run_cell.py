"""The whole way: plan, worker process, records - and how it ends when something else ends first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_pdperf.errors import RoleDied, UsageProblem
from pytest_pdperf.load.plan import plan_cell
from pytest_pdperf.load.progress import Progress
from pytest_pdperf.load.run import LoadError, deadline_s, run_cell
from pytest_pdperf.load.target import Target
from pytest_pdperf.measure.records import CellRecords, Status
from pytest_pdperf.measure.summarise import summarise
from pytest_pdperf.spec.workload import Cell, ClosedLoop, OpenLoop, Stream
from tests.integration.load.scripted_server import Script, Segment, scripted

TOKENS = 4


def answer(prompt: int, delay_ms: float = 10) -> Script:
    """TOKENS tokens, usage and [DONE], for a prompt of so many tokens."""
    texts = [
        {"choices": [{"text": "t", "finish_reason": "length" if i == TOKENS - 1 else None}]}
        for i in range(TOKENS)
    ]
    usage = {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": TOKENS}}
    return Script(
        [Segment(delay_ms, b"data: " + json.dumps(d).encode() + b"\n\n") for d in texts]
        + [Segment(0, b"data: " + json.dumps(usage).encode() + b"\n\n"), Segment(0, b"data: [DONE]\n\n")]
    )


def cell(requests: int = 8, concurrency: int = 2, **changes: Any) -> Cell:
    stream = Stream(
        input_tokens=(6, 6),
        output_tokens=TOKENS,
        requests=requests,
        arrival=ClosedLoop(concurrency=concurrency),
    )
    return Cell.model_validate(
        {"workload": "w", "id": "c", "streams": (stream,), "warmups": 2, "timeout_s": 10} | changes
    )


def run(url: str, folder: Path, made: Cell, **more: Any) -> CellRecords:
    return run_cell(Target(url, "m"), made, seed=1, salt="r", out_dir=folder / "out", **more)


def workers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "pytest_pdperf.load.worker" in command(p)]


def command(process: psutil.Process) -> list[str]:
    """Its arguments; none when it has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return [""]


def kill_workers() -> None:
    for worker in workers():
        worker.send_signal(signal.SIGKILL)


def test_a_cell_from_plan_to_result(tmp_path: Path) -> None:
    told: list[Progress] = []
    with scripted([answer(6)]) as server:
        records = run(server.url, tmp_path, cell(), on_progress=told.append)
        assert server.peak == 2
    assert records.stamp_source == "kernel"
    assert [r.warmup for r in records.requests] == [True] * 2 + [False] * 8
    assert [r.status for r in records.requests] == [Status.OK] * 10
    assert records.reached_concurrency == {"main": 2}
    assert records.client_cpu_s > 0
    assert records.started_ns <= min(r.sent_ns for r in records.requests if not r.warmup)
    assert max(r.end_ns or 0 for r in records.requests) <= records.ended_ns
    assert max(r.end_ns or 0 for r in records.requests if r.warmup) <= records.started_ns
    assert told[-1].phase == "decode"
    assert not workers()
    sent = {bytes(s.request).partition(b"\r\n\r\n")[2] for s in server.served}
    planned = plan_cell(cell(), Target("http://another", "m"), seed=1, salt="r")[0]
    prompts = {tuple(json.loads(body)["prompt"]) for body in sent}
    assert prompts == {r.prompt for r in (*planned.requests, *planned.warmups)}
    result = summarise(records, cell(), "topology")
    assert result.requests == result.ok == 8
    assert result.metrics["ttft_ms_p50"].value is not None
    busy = ("in flight", "too little CPU")
    assert not [line for line in result.invalid if not any(sign in line for sign in busy)]
    left = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert left == ["job.json", "records.json", "stamps.bin", "worker.log"]


def test_wrong_prompt_lengths_make_the_cell_invalid(tmp_path: Path) -> None:
    with scripted([answer(7)]) as server:
        result = summarise(run(server.url, tmp_path, cell(2, 1)), cell(2, 1), "t")
    assert result.ok == 0
    assert (
        "2 of 2 requests failed (2 wrong_prompt_length): server counted 7 prompt tokens, planned 6"
        in result.invalid
    )
    assert result.metrics["ttft_ms_p50"].value is None


def test_streams_together(tmp_path: Path) -> None:
    shape = {"input_tokens": (6, 6), "output_tokens": TOKENS}
    steady = Stream.model_validate(
        shape | {"name": "steady", "requests": 4, "arrival": ClosedLoop(concurrency=2)}
    )
    burst = Stream.model_validate(shape | {"name": "burst", "requests": 3, "arrival": OpenLoop(rate_rps=50)})
    made = cell(streams=(steady, burst))
    with scripted([answer(6)]) as server:
        result = summarise(run(server.url, tmp_path, made), made, "t")
    assert result.ok == 7
    assert set(result.streams) == {"steady", "burst"}
    assert result.metrics["burst.ttft_ms_p50"] == result.streams["burst"]["ttft_ms_p50"]
    assert result.metrics["ttft_ms_p50"] == result.streams["steady"]["ttft_ms_p50"]


def test_a_role_that_dies_ends_the_worker_at_once(tmp_path: Path) -> None:
    calls: list[float] = []

    def check() -> None:
        calls.append(time.monotonic())
        if len(calls) > 12:
            raise RoleDied("decode-0", "signal SIGKILL")

    with scripted([Script([], head=None, chunked=False, end="hold")]) as server:
        started = time.monotonic()
        with pytest.raises(RoleDied, match="decode-0"):
            run(server.url, tmp_path, cell(timeout_s=60), check=check)
    assert not workers()
    assert time.monotonic() - started < 30
    steps = sorted(b - a for a, b in pairwise(calls))
    assert steps[len(steps) // 2] <= 0.2, "check is called five times a second or more"


def test_a_worker_that_dies_is_not_a_measurement(tmp_path: Path) -> None:
    with scripted([answer(6, 200)]) as server, pytest.raises(LoadError, match="signal SIGKILL"):
        run(server.url, tmp_path, cell(), check=kill_workers)


def test_a_stale_result_is_never_read(tmp_path: Path) -> None:
    with scripted([answer(6)]) as server:
        run(server.url, tmp_path, cell())
        with pytest.raises(LoadError):
            run(server.url, tmp_path, cell(), check=kill_workers)


def test_bad_input_stops_before_anything_is_sent(tmp_path: Path) -> None:
    with scripted([answer(6)]) as server:
        with pytest.raises(UsageProblem, match="fit the server's context of 9"):
            run_cell(
                Target(server.url, "m", max_context=9), cell(), seed=1, salt="r", out_dir=tmp_path / "out"
            )
        with pytest.raises(UsageProblem, match="PDPERF_NO_SUCH_KEY is not set"):
            target = Target(server.url, "m", headers_from_env={"Authorization": "PDPERF_NO_SUCH_KEY"})
            run_cell(target, cell(), seed=1, salt="r", out_dir=tmp_path / "out")
        assert server.connections == 0
    assert not (tmp_path / "out").exists()


def test_secrets_reach_the_server_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDPERF_TEST_KEY", "Bearer very-secret")
    with scripted([answer(6)]) as server:
        target = Target(server.url, "m", headers_from_env={"Authorization": "PDPERF_TEST_KEY"})
        run_cell(target, cell(), seed=1, salt="r", out_dir=tmp_path / "out")
        assert all(b"Authorization: Bearer very-secret" in s.request for s in server.served)
    assert not [p for p in (tmp_path / "out").iterdir() if b"very-secret" in p.read_bytes()]


def test_a_key_that_a_server_repeats_is_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_KEY", "very-secret")
    body = b"no: 'very-secret' is no key of ours"
    head = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: %d\r\n\r\n" % len(body)
    with scripted([Script([Segment(0, body)], head=head, chunked=False)]) as server:
        target = Target(server.url, "m", key_env="OUR_KEY")
        records = run_cell(target, cell(2, 1), seed=1, salt="r", out_dir=tmp_path / "out")
        assert all(b"Authorization: Bearer very-secret" in s.request for s in server.served)
    assert "is no key of ours" in records.requests[0].error
    assert not [p for p in (tmp_path / "out").iterdir() if b"very-secret" in p.read_bytes()]


def test_worker_dies_with_its_parent(tmp_path: Path) -> None:
    """A killed pytest leaves no load generator behind."""
    script = (
        "import sys; from pathlib import Path\n"
        "from tests.integration.load.test_load_run_cell import cell, run\n"
        "run(sys.argv[1], Path(sys.argv[2]), cell(timeout_s=60))\n"
    )
    with scripted([Script([], head=None, chunked=False, end="hold")]) as server:
        owner = subprocess.Popen(
            [sys.executable, "-c", script, server.url, str(tmp_path)], cwd=Path(__file__).resolve().parents[3]
        )
        try:
            wait_for(lambda: bool(server.served))
            (worker,) = psutil.Process(owner.pid).children()
            assert os.getsid(worker.pid) == worker.pid
        finally:
            owner.kill()
            owner.wait()
        wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_the_deadline_of_the_whole_covers_every_wave() -> None:
    plans = plan_cell(cell(8, 2, warmups=3), Target("http://h", "m"), seed=1, salt="r")
    assert deadline_s(plans, 10.0) == 2 * 10 + 4 * 10 + 60
    opened = Stream(
        input_tokens=(6, 6), output_tokens=1, requests=3, arrival=OpenLoop(rate_rps=1, process="constant")
    )
    plans = plan_cell(cell(streams=(opened,), warmups=0), Target("http://h", "m"), seed=1, salt="r")
    assert deadline_s(plans, 10.0) == 2 + 10 + 60


def test_usage_of_the_worker() -> None:
    made = subprocess.run(
        [sys.executable, "-m", "pytest_pdperf.load.worker"], capture_output=True, text=True, check=False
    )
    assert (made.returncode, made.stderr) == (
        2,
        "usage: python -m pytest_pdperf.load.worker JOB OUT [NUMBER]\n",
    )
