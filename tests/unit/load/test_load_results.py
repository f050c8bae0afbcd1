"""Everything that crosses the process border comes back as it went."""

from __future__ import annotations

import os
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_pdperf.load.exchange import Exchange
from pytest_pdperf.load.job import Job
from pytest_pdperf.load.plan import plan_cell
from pytest_pdperf.load.results import read_records, write_records
from pytest_pdperf.load.spool import Spool
from pytest_pdperf.load.target import Target
from pytest_pdperf.measure.records import CellRecords, RequestRecord, Status
from pytest_pdperf.spec.workload import Cell, ClosedLoop, OpenLoop, Stream

FULL = RequestRecord(
    "main", 3, False, Status.SHORT, 5, 6, 10, 9, 99, (20, 30), (1, 2), (1, 2), 5, 3, "length", 200, "why", "id-1", "tö",
    (7, 8, 9), True, 3, "usage",
)  # fmt: skip
BARE = RequestRecord("burst", 0, True, Status.CONNECT_ERROR, 5, 6, 11)
CELL = {
    "stamp_source": "kernel", "started_ns": 1, "ended_ns": 2, "max_in_flight": 3,
    "reached_concurrency": {"main": 2}, "client_cpu_s": 0.5, "warnings": ("w",),
}  # fmt: skip


def test_records_round_trip(tmp_path: Path) -> None:
    write_records(tmp_path, [FULL, BARE, replace(FULL, index=4)], CELL)
    found = read_records(tmp_path)
    assert found.requests == (FULL, BARE, replace(FULL, index=4))
    assert all(type(r.status) is Status for r in found.requests)
    assert found == CellRecords(requests=found.requests, **CELL)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [-8, 8])
def test_a_torn_result_is_refused(tmp_path: Path, change: int) -> None:
    write_records(tmp_path, [FULL], CELL)
    stamps = tmp_path / "stamps.bin"
    size = stamps.stat().st_size
    with stamps.open("ab") as file:
        file.write(b"\0" * 8)
    os.truncate(stamps, size + change)
    with pytest.raises(ValueError, match=r"stamps\.bin is (longer|shorter)"):
        read_records(tmp_path)


def test_jobs_round_trip(tmp_path: Path) -> None:
    target = Target(
        "http://h", "m", api="chat", vocab=(3, 900), headers_from_env={"a": "B"}, extra_body={"x": [1]}
    )
    closed = Stream(
        input_tokens=(4, 9), output_tokens=4, requests=3, arrival=ClosedLoop(concurrency=2, think_s=1.5)
    )
    opened = Stream(name="b", input_tokens=(4, 4), output_tokens=4, requests=3, arrival=OpenLoop(rate_rps=3))
    cell = Cell(workload="w", id="c", streams=(closed, opened), warmups=3)
    job = Job(target, plan_cell(cell, target, seed=1, salt="r"), 5.0, "run", (0,))
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job
    assert job.total == 6


def exchange(body: list[bytes]) -> Exchange:
    return Exchange("main", 0, False, 1, 1, body=body, payload=b"sent")


def test_spool_gives_bodies_back_and_frees_them(tmp_path: Path) -> None:
    one, two, three = exchange([b"ab", b"c"]), exchange([]), exchange([b"d" * 100_000])
    with Spool(tmp_path / "s") as spool:
        for made in (one, two, three):
            spool.put(made)
            assert made.payload == b""
        spool.write()
        assert [e.body for e in (one, two, three)] == [[], [], []]
        assert [spool.get(e) for e in (three, one, two)] == [b"d" * 100_000, b"abc", b""]
    assert not (tmp_path / "s").exists()


def test_spool_writes_a_few_at_a_time_in_order(tmp_path: Path) -> None:
    """Bodies are begun until the time is over, so a queue of any length holds the loop no longer than that."""
    queued = [exchange([b"%d" % i]) for i in range(5)]
    moments = iter(range(100))
    with Spool(tmp_path / "s", clock=lambda: next(moments)) as spool:
        for made in queued:
            spool.put(made)
        spool.write(3)
        assert [bool(e.body) for e in queued] == [False, False, True, True, True], (
            "begun at 1 and 2, not at 3"
        )
        spool.write(0)
        assert sum(bool(e.body) for e in queued) == 3
        assert [spool.get(e) for e in queued] == [b"0", b"1", b"2", b"3", b"4"]
        assert not any(e.body for e in queued)


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    one, two = exchange([b"kept on disk"]), exchange([b"kept in memory"])
    with Spool(tmp_path / "s") as spool:
        spool.put(one)
        spool.write()
        full = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115, PTH123
        disk, spool._file = spool._file, full
        spool.put(two)
        spool.write()
        spool._file = disk
        full.close()
        assert "No space left" in spool.problem
        spool.put(three := exchange([b"after"]))
        assert [spool.get(e) for e in (one, two, three)] == [b"kept on disk", b"kept in memory", b"after"]


def test_marks_hold_24_bytes_a_read() -> None:
    made = exchange([])
    made.size = 5
    made.mark(10, 12)
    assert made.marks == array("q", [5, 10, 12])
    assert made.marks.itemsize * len(made.marks) == 24
