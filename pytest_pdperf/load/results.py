"""The worker's result on disk: JSON for what is said once, int64 blocks for what is said per event."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from pytest_pdperf.measure.records import CellRecords, RequestRecord, Status

_ARRAYS = ("event_ns", "event_lag_ns", "event_tokens")
_PLAIN = tuple(f.name for f in fields(RequestRecord) if f.name not in _ARRAYS)


def write_records(folder: Path, records: Iterable[RequestRecord], cell: dict[str, Any]) -> None:
    """Store records one by one - they are never all in memory - and then what is known of the cell."""
    rows = []
    with (folder / "stamps.bin").open("wb") as stamps:
        for record in records:
            rows.append({name: getattr(record, name) for name in _PLAIN} | {"events": len(record.event_ns)})
            for name in _ARRAYS:
                array("q", getattr(record, name)).tofile(stamps)
    (folder / "records.json").write_bytes(orjson.dumps({"cell": cell, "requests": rows}))


def store_records(folder: Path, records: CellRecords) -> None:
    """`write_records` for records that are in memory."""
    cell = {f.name: getattr(records, f.name) for f in fields(CellRecords) if f.name != "requests"}
    write_records(folder, records.requests, cell)


def read_records(folder: Path) -> CellRecords:
    """Inverse of `write_records`. Raises OSError or ValueError when the result is not whole."""
    data = orjson.loads((folder / "records.json").read_bytes())
    with (folder / "stamps.bin").open("rb") as stamps:
        requests = tuple(_record(row, stamps) for row in data["requests"])
        if stamps.read(1):
            raise ValueError("stamps.bin is longer than records.json says")
    cell = data["cell"] | {"warnings": tuple(data["cell"]["warnings"])}
    return CellRecords(requests=requests, **cell)


def _record(row: dict[str, Any], stamps: BinaryIO) -> RequestRecord:
    count = row.pop("events")
    row["status"] = Status(row["status"])
    row["token_ids"] = tuple(row["token_ids"])
    row.update(zip(_ARRAYS, _columns(stamps, count), strict=True))
    return RequestRecord(**row)


def _columns(stamps: BinaryIO, count: int) -> Iterator[tuple[int, ...]]:
    for _ in _ARRAYS:
        column: array[int] = array("q")
        raw = stamps.read(8 * count)
        if len(raw) != 8 * count:
            raise ValueError("stamps.bin is shorter than records.json says")
        column.frombytes(raw)
        yield tuple(column)
