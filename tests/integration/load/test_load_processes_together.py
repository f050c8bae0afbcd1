"""Several client processes drive one cell: together they are one client, also when one of them dies."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from pytest_pdperf.load.plan import plan_cell
from pytest_pdperf.load.progress import Progress
from pytest_pdperf.load.results import read_records
from pytest_pdperf.load.run import LoadError
from pytest_pdperf.load.target import Target
from pytest_pdperf.measure.records import CellRecords, Status
from pytest_pdperf.measure.samples import gaps_ms
from pytest_pdperf.measure.summarise import summarise
from pytest_pdperf.spec.workload import ClosedLoop, OpenLoop, Stream
from tests.integration.load.scripted_server import scripted
from tests.integration.load.test_load_run_cell import TOKENS, answer, cell, command, run, workers


def shape(records: CellRecords) -> list[tuple[object, ...]]:
    """All of a result that does not depend on the moment."""
    return [
        (r.stream, r.index, r.warmup, r.status, len(r.event_ns), r.event_tokens, r.prompt_tokens, r.text)
        for r in records.requests
    ]


def test_two_processes_leave_what_one_leaves(tmp_path: Path) -> None:
    told: list[Progress] = []
    made = cell(10, 3)
    with scripted([answer(6, 40)]) as server:
        one = run(server.url, tmp_path / "one", made)
        two = run(server.url, tmp_path / "two", made, processes=2, on_progress=told.append)
        assert server.peak == 3
    assert shape(two) == shape(one)
    assert (one.client_processes, two.client_processes) == (1, 2)
    assert one.reached_concurrency == two.reached_concurrency == {"main": 3}
    assert all(len(r.event_lag_ns) == len(r.event_ns) == TOKENS for r in two.requests)
    assert two.client_cpu_s > 0
    assert min(r.sent_ns for r in two.requests if not r.warmup) >= two.started_ns
    assert max(r.end_ns or 0 for r in two.requests) <= two.ended_ns
    first = sorted(r.sent_ns for r in two.requests if not r.warmup)[:3]
    assert first[2] < min(r.end_ns or 0 for r in two.requests if not r.warmup), "all began before any ended"
    planned = plan_cell(made, Target("http://another", "m"), seed=1, salt="r")[0]
    sent = [tuple(json.loads(bytes(s.request).partition(b"\r\n\r\n")[2])["prompt"]) for s in server.served]
    assert sorted(sent) == sorted(r.prompt for r in (*planned.requests, *planned.warmups) for _ in "12")
    assert any(state.phase == "ready" for state in told)
    assert told[-1].phase == "decode"
    result = summarise(two, made, "topology")
    assert (result.requests, result.ok, result.client_processes) == (10, 10, 2)
    assert not any("clients were busy" in line for line in result.invalid)
    assert read_records(tmp_path / "two" / "out") == two
    left = sorted(str(p.relative_to(tmp_path / "two" / "out")) for p in (tmp_path / "two").rglob("*.*"))
    assert left == [
        "job.json",
        "process-1/worker.log",
        "process-2/worker.log",
        "records.json",
        "stamps.bin",
    ]


def test_an_open_loop_keeps_its_schedule_over_processes(tmp_path: Path) -> None:
    """Due times are those of one process, counted from one start; streams of both kinds run side by side."""
    size = {"input_tokens": (6, 6), "output_tokens": TOKENS}
    steady = Stream.model_validate(
        size | {"name": "steady", "requests": 4, "arrival": ClosedLoop(concurrency=1, think_s=0.01)}
    )
    burst = Stream.model_validate(
        size | {"name": "burst", "requests": 7, "arrival": OpenLoop(rate_rps=40, process="gamma")}
    )
    made = cell(streams=(burst, steady))
    with scripted([answer(6, 5)]) as server:
        records = run(server.url, tmp_path, made, processes=3)
    plan = plan_cell(made, Target("http://another", "m"), seed=1, salt="r")[0]
    due = [r.scheduled_ns for r in records.requests if r.stream == "burst" and not r.warmup]
    assert due == [records.started_ns + round((r.at_s or 0) * 1e9) for r in plan.requests]
    assert all(r.sent_ns >= (r.scheduled_ns or 0) for r in records.requests)
    assert [r.status for r in records.requests] == [Status.OK] * 13
    assert records.reached_concurrency["steady"] == 1
    assert all((gaps_ms(r) >= 0).all() for r in records.requests)


def test_a_process_that_dies_fails_the_cell_and_the_others_keep_what_they_measured(tmp_path: Path) -> None:
    def kill_second() -> None:
        for worker in workers():
            if command(worker)[-1] == "1" and len(server.served) > 6:
                worker.send_signal(signal.SIGKILL)

    started = time.monotonic()
    with scripted([answer(6, 30)]) as server:
        with pytest.raises(LoadError) as caught:
            run(server.url, tmp_path, cell(4000, 2), processes=2, check=kill_second)
        sent = len(server.served)
    assert time.monotonic() - started < 60
    assert str(caught.value).startswith("load worker 2 of 2 ended with signal SIGKILL: no message; what the")
    assert "process-1" in str(caught.value)
    kept = read_records(tmp_path / "out" / "process-1")
    measured = [r for r in kept.requests if not r.warmup]
    assert 0 < len(measured) < sent
    assert f"{len(measured)} requests in" in str(caught.value)
    assert measured[0].status is Status.OK
    assert not (tmp_path / "out" / "records.json").exists()
    assert not workers()


def test_a_process_that_dies_before_the_start_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    def kill_second() -> None:
        for worker in workers():
            if command(worker)[-1] == "1":
                worker.send_signal(signal.SIGKILL)

    with scripted([answer(6, 5)]) as server:
        with pytest.raises(LoadError, match="load worker 2 of 2 ended with signal SIGKILL"):
            run(server.url, tmp_path, cell(8, 2, warmups=0), processes=2, check=kill_second)
    assert not workers()


def test_a_worker_that_is_asked_to_stop_is_no_measurement(tmp_path: Path) -> None:
    """SIGTERM from outside ends a single worker early: what it has is stored, and the cell fails."""

    def stop() -> None:
        if len(server.served) > 6:
            for worker in workers():
                worker.terminate()

    with scripted([answer(6, 20)]) as server:
        with pytest.raises(LoadError, match="exit status 3: stopped early"):
            run(server.url, tmp_path, cell(4000, 2), check=stop)
    kept = [r for r in read_records(tmp_path / "out").requests if not r.warmup]
    assert 0 < len(kept) < 4000
    assert kept[0].status is Status.OK
    assert kept[-1].error == "the run was stopped before the answer was whole"


def test_the_client_stays_on_its_cores(tmp_path: Path) -> None:
    """On a machine with two CPUs or more; the record says which."""
    usable = sorted(psutil.Process().cpu_affinity() or [])
    seen: set[tuple[int, ...]] = set()

    def look() -> None:
        for worker in workers():
            with contextlib.suppress(psutil.Error):
                seen.add(tuple(worker.cpu_affinity() or ()))

    with scripted([answer(6, 40)]) as server:
        records = run(server.url, tmp_path, cell(), cpus=(usable[-1],), check=look)
    assert (usable[-1],) in seen
    assert records.client_cores == str(usable[-1])
