"""The raw file gives back every record exactly, opens as plain Parquet, and refuses what is not one."""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from importlib.util import find_spec
from math import isnan
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
from pytest_pdperf.report.exchange import raw
from pytest_pdperf.report.exchange.chosen import Chosen, choose
from pytest_pdperf.report.exchange.detect import import_file
from pytest_pdperf.report.exchange.raw import arrow, read_raw, write_raw
from pytest_pdperf.report.exchange.raw_columns import COLUMNS, IDENTITY
from pytest_pdperf.report.source import load_run
from tests.unit.report.report_data import outcome, request, small_run

needs_pyarrow = pytest.mark.skipif(
    find_spec("pyarrow") is None,
    reason="pyarrow is missing: pip install 'pytest-pdperf[parquet]'",
)
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "raw-format.md"
NANOSECONDS = st.integers(0, 2**62)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)


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
        error=draw(TEXT),
        request_id=draw(TEXT),
        text=draw(TEXT),
        token_ids=tuple(draw(st.lists(st.integers(0, 2**31), max_size=4))),
        not_streamed=draw(st.booleans()),
        output_tokens=draw(st.none() | st.integers(0, 99)),
        token_count_source=draw(st.sampled_from(["usage", "unknown"])),
    )


def same(one: CellRecords, other: CellRecords) -> bool:
    """Equal field by field, and a NaN only where there was one."""
    for name in (f.name for f in fields(CellRecords)):
        a, b = getattr(one, name), getattr(other, name)
        both_nan = isinstance(a, float) and isinstance(b, float) and isnan(a) and isnan(b)
        if type(a) is not type(b) or (a != b and not both_nan):
            return False
    return True


@needs_pyarrow
@settings(max_examples=40, deadline=None)
@given(
    st.lists(requests(), max_size=4),
    st.lists(requests(), max_size=2),
    st.sampled_from([0.25, 0.0, float("nan"), float("inf"), float("-inf")]),
)
def test_round_trip_of_any_records(
    tmp_path_factory: pytest.TempPathFactory,
    first: list[RequestRecord],
    last: list[RequestRecord],
    cpu_s: float,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    made = [
        CellRecords(tuple(first), "kernel", 5, 9, 2, {"main": 2}, cpu_s, 3, ("odd",), 2, "0-3"),
        CellRecords(tuple(last), "user", 6, 7),
    ]
    run = load_run(folder)
    path = folder / "events.parquet"
    assert write_raw(run, [Chosen(run, outcome(), records, "") for records in made], path) == []
    cells = list(read_raw(path))
    assert len(cells) == 2
    for cell, records in zip(cells, made, strict=True):
        assert same(cell.records, records)
        assert cell.outcome == outcome()


def test_what_tells_records_apart_is_looked_at() -> None:
    records = CellRecords((), "kernel", 5, 9, client_cpu_s=float("nan"))
    assert same(records, records) and same(records, replace(records))
    assert not same(records, replace(records, client_cpu_s=0.0))
    assert not same(records, replace(records, client_cpu_s=None))  # type: ignore[arg-type]


def test_every_field_of_a_record_is_a_column() -> None:
    ours = {f.name for f in fields(RequestRecord)}
    assert {c.name for c in COLUMNS} == ours | set(IDENTITY) and not ours & set(IDENTITY)
    optional = {f.name for f in fields(RequestRecord) if "None" in str(f.type)}
    assert {c.name for c in COLUMNS if c.nullable} == optional
    assert {c.name for c in COLUMNS if c.many} == {
        f.name for f in fields(RequestRecord) if str(f.type).startswith("tuple")
    }


def test_the_page_lists_the_columns() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [
        (
            c.name,
            c.kind.rstrip("_") + ("[]" if c.many else "?" if c.nullable else ""),
            c.unit or "-",
            c.meaning,
        )
        for c in COLUMNS
    ]


@needs_pyarrow
@pytest.mark.parametrize("library", ["polars", "pandas", "pytest_pdperf", "duckdb"])
def test_the_examples_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], library: str
) -> None:
    module = pytest.importorskip(library, reason=f"{library} is not installed; the others read the same file")
    main(["export", str(small_run(tmp_path / "run")), "--as", "raw", "-o", str(tmp_path / "events.parquet")])
    monkeypatch.chdir(tmp_path)
    median = load_run(tmp_path / "run").outcomes[0].result.metrics["ttft_ms_p50"].value
    capsys.readouterr()
    if library == "duckdb":
        (script,) = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
        for statement in filter(str.strip, script.split(";")):
            print(module.sql(statement).fetchall())
    else:
        scripts = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        (script,) = [text for text in scripts if re.search(rf"(import|from) {library}\b", text)]
        exec(script, {})
    said = capsys.readouterr().out
    assert "in512-out256-c1" in said and (library == "pytest_pdperf" or f"{median:g}" in said)


@needs_pyarrow
def test_a_run_comes_back_whole_and_in_the_same_bytes(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run")
    path = tmp_path / "events.parquet"
    assert main(["export", str(folder), "--as", "raw", "-o", str(path)]) == 0
    run = load_run(folder)
    cells = list(read_raw(path))
    assert [cell.outcome for cell in cells] == list(run.outcomes)
    for cell in cells:
        assert cell.records == read_records(folder / "records" / cell.topology / cell.cell)
    again = tmp_path / "again.parquet"
    write_raw(run, choose(run), again)
    assert again.read_bytes() == path.read_bytes()
    assert not list(tmp_path.glob("*.part"))


@needs_pyarrow
def test_events_take_a_few_bytes_each(tmp_path: Path) -> None:
    """A stamp, a lag and a count are 24 bytes in memory; stamps as differences and equal counts take a fifth."""
    rng = np.random.default_rng(7)
    steps = rng.normal(10e6, 0.3e6, (40, 1000)).astype(int).cumsum(axis=1) + 10**18
    made = [
        RequestRecord(
            "main",
            i,
            False,
            Status.OK,
            512,
            1000,
            10**18,
            event_ns=tuple(row.tolist()),
            event_lag_ns=tuple(rng.integers(3000, 9000, 1000).tolist()),
            event_tokens=(1,) * 1000,
        )
        for i, row in enumerate(steps)
    ]
    run, path = load_run(tmp_path), tmp_path / "e.parquet"

    def size(requests: Iterable[RequestRecord]) -> int:
        write_raw(run, [Chosen(run, outcome(), CellRecords(tuple(requests), "kernel", 5, 9), "")], path)
        return path.stat().st_size

    assert (
        size(made) - size(replace(r, event_ns=(), event_lag_ns=(), event_tokens=()) for r in made)
    ) < 5 * 40_000


@needs_pyarrow
def test_plain_parquet_with_its_meaning_in_it(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run")
    path = tmp_path / "events.parquet"
    main(["export", str(folder), "--as", "raw", "-o", str(path)])
    table = arrow().parquet.read_table(path)
    header = orjson.loads(arrow().parquet.read_metadata(path).metadata[b"pdperf"])
    assert (header["format"], header["version"], header["definitions"]) == ("pdperf-raw", 2, "pdperf-1")
    assert (
        header["columns"]["sent_ns"]["unit"]
        == "ns"
        == table.schema.field("sent_ns").metadata[b"unit"].decode()
    )
    run = load_run(folder)
    assert [(c["topology"], c["cell"]) for c in header["cells"]] == [
        (o.topology, o.result.cell) for o in run.outcomes
    ]
    measured = run.outcomes[0]
    rows = [
        r
        for r in table.to_pylist()
        if (r["run"], r["topology"], r["cell"]) == (run.name, measured.topology, measured.result.cell)
        and r["status"] == "ok"
        and not r["warmup"]
    ]
    ttft_ms = [(r["event_ns"][0] - r["sent_ns"]) / 1e6 for r in rows]
    assert np.median(ttft_ms) == pytest.approx(measured.result.metrics["ttft_ms_p50"].value)
    assert header["metrics"]["ttft_ms_p50"]["unit"] == "ms" and header["metrics"]["ttft_ms_p50"]["definition"]


@needs_pyarrow
def test_a_cell_without_records_is_left_out_and_none_at_all_is_an_error(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run")
    path = tmp_path / "events.parquet"
    (folder / "records" / "pd-1p2d" / "in512-out256-c4" / "stamps.bin").write_bytes(b"short")
    assert main(["export", str(folder), "--as", "raw", "-o", str(path)]) == 1
    assert len(list(read_raw(path))) == 5
    before = path.read_bytes()
    run = load_run(folder)
    with pytest.raises(UsageProblem, match="shorter than"):
        write_raw(run, choose(run, "pd-1p2d", "in512-out256-c4"), path)
    assert path.read_bytes() == before
    with pytest.raises(UsageProblem, match="cannot be written"):
        write_raw(run, choose(run), tmp_path / "no" / "events.parquet")


@needs_pyarrow
def test_import_shows_a_raw_file_beside_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small_run(tmp_path / "run")
    path = tmp_path / "events.parquet"
    main(["export", str(folder), "--as", "raw", "-o", str(path)])
    found = import_file(path)
    outcomes = load_run(folder).outcomes
    assert len(found) == len(outcomes) and found == import_file(path, "pdperf")
    ours, theirs = outcomes[0].result, found[0]
    assert theirs.metrics["ttft_ms_p50"].value == ours.metrics["ttft_ms_p50"].value
    assert (theirs.requests, theirs.ok, theirs.lengths) == (ours.requests, ours.ok, "exact")
    assert np.median(theirs.samples["ttft_ms"]) == pytest.approx(ours.metrics["ttft_ms_p50"].value)
    capsys.readouterr()
    assert main(["import", str(path), "--beside", str(folder), "--cell", ours.cell]) == 0
    assert "pdperf-raw 2" in capsys.readouterr().out


@needs_pyarrow
def test_numbers_of_other_definitions_keep_their_own_names(tmp_path: Path) -> None:
    run, path = load_run(tmp_path), tmp_path / "e.parquet"
    old = replace(outcome(), result=replace(outcome().result, definitions="pdperf-0"))
    write_raw(run, [Chosen(run, old, CellRecords((), "kernel", 5, 9), "")], path)
    (found,) = import_file(path)
    assert "ttft_ms_p50" not in found.metrics
    assert "pdperf-0" in found.metrics["pdperf:ttft_ms_p50"].definition


def test_without_pyarrow_the_extra_is_named_before_a_run_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    missing = tmp_path / "no-such-run"
    assert main(["export", str(missing), "--as", "raw", "-o", str(tmp_path / "e.parquet")]) == 2
    said = capsys.readouterr().err
    assert "pip install 'pytest-pdperf[parquet]'" in said and "no-such-run" not in said
    (tmp_path / "e.parquet").write_bytes(b"PAR1")
    assert main(["import", str(tmp_path / "e.parquet")]) == 2
    assert "pytest-pdperf[parquet]" in capsys.readouterr().err


@needs_pyarrow
def test_what_is_no_raw_file(tmp_path: Path) -> None:
    path = tmp_path / "events.parquet"

    def refused(text: str) -> None:
        with pytest.raises(UsageProblem, match=text) as caught:
            list(read_raw(path))
        assert str(path) in str(caught.value)

    refused("cannot be read: No such file")
    for content in (b"", b"{}", b"PAR1", b"PAR1" + b"\0" * 50 + b"PAR1"):
        path.write_bytes(content)
        refused("no whole pdperf-raw file")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.npy", b"")
    refused("of version 1, a zip of numpy arrays; this version reads pdperf-raw 2")
    lib = arrow()
    lib.parquet.write_table(lib.core.table({"a": [1]}), path)
    refused(r"no key 'pdperf' \(columns: a\)")
    for header, text in (
        ({"format": "pdperf-raw", "version": 9}, "pdperf-raw of version 9; this version reads pdperf-raw 2"),
        ({"format": "pdperf-raw", "version": 2}, "column 'run' is None, want string"),
        ([], "no whole pdperf-raw file"),
    ):
        table = lib.core.table({"a": [1]}).replace_schema_metadata({b"pdperf": orjson.dumps(header)})
        lib.parquet.write_table(table, path)
        refused(text)
    path.unlink()
    path.mkdir()
    refused("is a folder")


def cut(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


def flipped(whole: bytes) -> bytes:
    """One bit of the first data page's body turned, which neither the footer nor the codec need notice."""
    at = whole.index(b"\x28\xb5\x2f\xfd") + 12
    return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]


def without_footer(whole: bytes) -> bytes:
    return whole[:-20]


@needs_pyarrow
@pytest.mark.parametrize("damage", [cut, flipped, without_footer])
def test_damaged_files_are_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    folder = small_run(tmp_path / "run")
    path = tmp_path / "events.parquet"
    main(["export", str(folder), "--as", "raw", "-o", str(path)])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageProblem, match=r"no whole pdperf-raw file .*; export the run again"):
        list(read_raw(path))


@needs_pyarrow
def test_a_flipped_bit_never_becomes_another_number(tmp_path: Path) -> None:
    """Not every flip breaks the compression: a page's checksum is what notices the others."""
    run, path = load_run(tmp_path), tmp_path / "e.parquet"
    made = CellRecords(tuple(request(i, ttft_ms=50.0 + i) for i in range(4)), "kernel", 5, 9)
    write_raw(run, [Chosen(run, outcome(), made, "")], path)
    whole = path.read_bytes()
    pages = whole.index(b"pdperf")  # the footer comes behind the pages
    for at in range(4, pages, max(1, pages // 80)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            (cell,) = read_raw(path)
        except UsageProblem:
            continue
        assert cell.records == made, f"byte {at}"


@needs_pyarrow
def test_fewer_rows_than_the_header_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [request(0)]
    run, path = load_run(tmp_path), tmp_path / "e.parquet"
    chosen = Chosen(run, outcome(), CellRecords(tuple(made), "kernel", 5, 9), "")
    bad = replace(made[0], event_lag_ns=())
    with pytest.raises(ValueError, match="unequal number"):
        write_raw(run, [replace(chosen, records=CellRecords((bad,), "kernel", 5, 9))], path)
    assert not path.exists() and not list(tmp_path.glob("*.part"))
    monkeypatch.setattr(raw, "_head", lambda c, r: {"cell": "c", "requests": 7})
    write_raw(run, [chosen], path)
    with pytest.raises(UsageProblem, match="1 rows for 7 requests"):
        list(read_raw(path))
    whole = raw._header
    monkeypatch.undo()
    monkeypatch.setattr(raw, "_header", lambda run, heads: whole(run, heads[:1]))
    write_raw(run, [chosen, chosen], path)
    with pytest.raises(UsageProblem, match="2 row groups, 1 cells with requests"):
        list(read_raw(path))
