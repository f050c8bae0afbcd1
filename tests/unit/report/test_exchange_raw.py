"""The raw file gives back every record exactly, and refuses what is not one."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_pdperf.cli import main
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.load.results import read_records
from pytest_pdperf.measure.records import CellRecords, RequestRecord, Status
from pytest_pdperf.report.exchange.chosen import Chosen, choose
from pytest_pdperf.report.exchange.raw import read_raw, write_raw
from pytest_pdperf.report.source import load_run
from tests.unit.report.report_data import outcome, small_run

NANOSECONDS = st.integers(0, 2**62)


@st.composite
def requests(draw: st.DrawFn) -> RequestRecord:
    count = draw(st.integers(0, 5))

    def many(values: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(st.lists(values, min_size=count, max_size=count)))

    return RequestRecord(
        stream=draw(st.sampled_from(["main", "burst"])),
        index=draw(st.integers(0, 99)),
        warmup=draw(st.booleans()),
        status=draw(st.sampled_from(Status)),
        planned_input_tokens=draw(st.integers(1, 10**6)),
        planned_output_tokens=draw(st.integers(1, 10**6)),
        sent_ns=draw(NANOSECONDS),
        scheduled_ns=draw(st.none() | NANOSECONDS),
        end_ns=draw(st.none() | NANOSECONDS),
        event_ns=many(NANOSECONDS),
        event_lag_ns=many(st.integers(-(10**9), 10**12)),
        event_tokens=many(st.integers(0, 99)),
        prompt_tokens=draw(st.none() | st.integers(0, 10**6)),
        completion_tokens=draw(st.none() | st.integers(0, 10**6)),
        finish_reason=draw(st.none() | st.text(max_size=5)),
        http_status=draw(st.none() | st.integers(100, 599)),
        error=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=9)),
        text=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=9)),
        token_ids=tuple(draw(st.lists(st.integers(0, 2**31), max_size=4))),
        not_streamed=draw(st.booleans()),
        output_tokens=draw(st.none() | st.integers(0, 99)),
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(requests(), max_size=4))
def test_round_trip_of_any_records(
    tmp_path_factory: pytest.TempPathFactory, made: list[RequestRecord]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    records = CellRecords(tuple(made), "kernel", 5, 9, 2, {"main": 2}, 0.25, 3, ("odd",))
    run = load_run(folder)
    path = folder / "events.npz"
    assert write_raw(run, [Chosen(run, outcome(), records, "")], path) == []
    (cell,) = read_raw(path)
    assert cell.records == records
    assert cell.outcome == outcome()


def test_a_run_comes_back_whole_and_smaller(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run")
    path = tmp_path / "events.npz"
    assert main(["export", str(folder), "--as", "raw", "-o", str(path)]) == 0
    run = load_run(folder)
    cells = list(read_raw(path))
    assert [cell.outcome for cell in cells] == list(run.outcomes)
    for cell in cells:
        assert cell.records == read_records(folder / "records" / cell.topology / cell.cell)
    assert path.stat().st_size < sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    again = tmp_path / "again.npz"
    write_raw(run, choose(run), again)
    assert again.read_bytes() == path.read_bytes()
    assert not list(tmp_path.glob("*.part"))


def test_numpy_alone_reads_it(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run")
    path = tmp_path / "events.npz"
    main(["export", str(folder), "--as", "raw", "-o", str(path)])
    with np.load(path, allow_pickle=False) as archive:
        header = orjson.loads(archive["header"].tobytes())
        first = np.concatenate(([0], np.cumsum(archive["c0/events"])[:-1]))
        ttft_ms = archive["c0/event_step_ns"][first] / 1e6
    measured = load_run(folder).outcomes[0].result
    assert (header["format"], header["version"], header["cells"][0]["cell"]) == (
        "pdperf-raw",
        1,
        measured.cell,
    )
    assert np.median(ttft_ms) == pytest.approx(measured.metrics["ttft_ms_p50"].value)


def test_a_cell_without_records_is_left_out_and_none_at_all_is_an_error(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run")
    path = tmp_path / "events.npz"
    (folder / "records" / "pd-1p2d" / "in512-out256-c4" / "stamps.bin").write_bytes(b"short")
    assert main(["export", str(folder), "--as", "raw", "-o", str(path)]) == 1
    assert len(list(read_raw(path))) == 5
    before = path.read_bytes()
    run = load_run(folder)
    with pytest.raises(UsageProblem, match="shorter than"):
        write_raw(run, choose(run, "pd-1p2d", "in512-out256-c4"), path)
    assert path.read_bytes() == before


def test_what_is_no_raw_file(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="cannot be read"):
        list(read_raw(tmp_path / "none.npz"))
    folder = small_run(tmp_path / "run")
    path = tmp_path / "events.npz"
    main(["export", str(folder), "--as", "raw", "-o", str(path)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageProblem, match="no whole pdperf-raw file"):
        list(read_raw(path))
    path.write_bytes(b"")
    with pytest.raises(UsageProblem, match="no whole pdperf-raw file"):
        list(read_raw(path))
    with zipfile.ZipFile(path, "w") as archive, archive.open("header.npy", "w") as member:
        header = orjson.dumps({"format": "pdperf-raw", "version": 9, "cells": []})
        np.lib.format.write_array(member, np.frombuffer(header, dtype=np.uint8))
    with pytest.raises(UsageProblem, match=r"pdperf-raw of version 9; this version reads pdperf-raw 1"):
        list(read_raw(path))
