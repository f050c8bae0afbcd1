"""Every event of a run in one Parquet file: for those who want other statistics than ours, in the tool they know.

The layout is described in docs/reference/raw-format.md; a change of it raises VERSION.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson

from pytest_pdperf import __version__
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.measure.records import CellRecords, RequestRecord, Status
from pytest_pdperf.measure.table import DEFINITIONS, METRICS
from pytest_pdperf.report.outcomes import CellOutcome
from pytest_pdperf.report.source import Run

from .chosen import Chosen
from .raw_columns import COLUMNS, IDENTITY, Column

FORMAT = "pdperf-raw"
VERSION = 2
"""1 was a zip of numpy arrays."""
KEY = b"pdperf"
"""Key of the header in the file's metadata."""
MAGIC = b"PAR1"
_ZIP = b"PK\x03\x04"
_EVENTS = ("event_ns", "event_lag_ns", "event_tokens")
_LEVEL = 9


@dataclass(frozen=True, slots=True)
class RawCell:
    """One cell of a raw file."""

    topology: str
    launch: int
    cell: str
    outcome: CellOutcome
    records: CellRecords


@dataclass(frozen=True, slots=True)
class Arrow:
    """pyarrow's two modules that are needed here; it is an extra, so nobody imports it by name."""

    core: Any
    parquet: Any


def arrow() -> Arrow:
    """The library behind Parquet. Raises UsageProblem that names the extra where it is not installed."""
    try:
        return Arrow(import_module("pyarrow"), import_module("pyarrow.parquet"))
    except ImportError as problem:
        raise UsageProblem(
            f"raw event files are Parquet, which needs pyarrow ({problem}): pip install 'pytest-pdperf[parquet]'"
        ) from None


def write_raw(run: Run, cells: Iterable[Chosen], path: Path) -> list[str]:
    """Write all cells that have records, a row group each; returns a line for each that has none.

    One cell is in memory at a time. A crash leaves the old file or none. Raises UsageProblem when no cell has
    records, pyarrow is missing or the file cannot be written.
    """
    lib = arrow()
    part = path.with_name(path.name + ".part")
    left_out: list[str] = []
    heads: list[dict[str, Any]] = []
    try:
        with lib.parquet.ParquetWriter(
            part,
            _schema(lib),
            compression="zstd",
            compression_level=_LEVEL,
            use_dictionary=[c.path for c in COLUMNS if c.repeats],
            column_encoding={c.path: "DELTA_BINARY_PACKED" for c in COLUMNS if c.delta},
            write_statistics=[*IDENTITY, "stream", "warmup", "status", "sent_ns"],
            write_page_checksum=True,
        ) as writer:
            for chosen in cells:
                if chosen.records is None:
                    left_out.append(f"{chosen.name}: left out, {chosen.missing}")
                    continue
                heads.append(_head(chosen, chosen.records))
                if chosen.records.requests:
                    writer.write_table(_table(lib, run, chosen, chosen.records))
            writer.add_key_value_metadata({KEY: orjson.dumps(_header(run, heads))})
        if not heads:
            raise UsageProblem(f"{run.name}: no cell has records of single requests: {'; '.join(left_out)}")
        part.replace(path)
    except OSError as problem:
        raise UsageProblem(f"{path}: cannot be written: {problem.strerror or problem}") from None
    finally:
        part.unlink(missing_ok=True)
    return left_out


def _schema(lib: Arrow) -> Any:
    return lib.core.schema([_field(lib, column) for column in COLUMNS])


def _field(lib: Arrow, column: Column) -> Any:
    plain = getattr(lib.core, column.kind)()
    kind = lib.core.list_(lib.core.field("element", plain, nullable=False)) if column.many else plain
    said = {"description": column.meaning} | ({"unit": column.unit} if column.unit else {})
    return lib.core.field(column.name, kind, nullable=column.nullable, metadata=said)


def _header(run: Run, heads: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "written_by": f"pytest-pdperf {__version__}",
        "run": run.name,
        "definitions": DEFINITIONS,
        "columns": {c.name: {"unit": c.unit, "meaning": c.meaning} for c in COLUMNS},
        "metrics": {m.id: {"unit": m.unit, "definition": m.definition} for m in METRICS.values()},
        "cells": heads,
    }


def _head(chosen: Chosen, records: CellRecords) -> dict[str, Any]:
    clock = {f.name: getattr(records, f.name) for f in fields(CellRecords) if f.name != "requests"}
    clock["client_cpu_s"] = _written(records.client_cpu_s)
    return {
        "topology": chosen.outcome.topology,
        "launch": chosen.outcome.launch,
        "cell": chosen.outcome.result.cell,
        "requests": len(records.requests),
        "clock": clock,
        "outcome": chosen.outcome.to_json(),
    }


def _written(value: float) -> float | str:
    """JSON has no word for what is not finite, and null would be "not known"."""
    return value if math.isfinite(value) else str(value)


def _table(lib: Arrow, run: Run, chosen: Chosen, records: CellRecords) -> Any:
    requests = records.requests
    for request in requests:
        if {len(getattr(request, name)) for name in _EVENTS} != {len(request.event_ns)}:
            raise ValueError(
                f"request {request.index}: its events have stamps, lags and tokens of unequal number"
            )
    said = {
        "run": run.name,
        "engine": chosen.outcome.engine,
        "topology": chosen.outcome.topology,
        "launch": chosen.outcome.launch,
        "workload": chosen.outcome.result.workload,
        "cell": chosen.outcome.result.cell,
    }
    columns = {name: [said[name]] * len(requests) for name in IDENTITY}
    columns |= {c.name: [getattr(r, c.name) for r in requests] for c in COLUMNS if c.name not in IDENTITY}
    columns["status"] = [r.status.value for r in requests]
    return lib.core.table(columns, schema=_schema(lib))


def read_raw(path: Path) -> Iterator[RawCell]:
    """The cells of a raw file, one in memory at a time; every page is held against its checksum.

    Raises UsageProblem for what is no such file, is damaged, or has another version (saying which), and where
    pyarrow is missing.
    """
    lib = arrow()
    try:
        _look(path)
        with lib.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            header = _checked(file, _schema(lib), path)
            group = 0
            for head in header["cells"]:
                rows = file.read_row_group(group).to_pylist() if head["requests"] else []
                group += bool(head["requests"])
                if len(rows) != head["requests"]:
                    raise ValueError(f"{len(rows)} rows for {head['requests']} requests of {head['cell']}")
                yield _cell(head, rows)
            if group != file.num_row_groups:
                raise ValueError(f"{file.num_row_groups} row groups, {group} cells with requests")
    except (KeyError, ValueError, TypeError, AttributeError, EOFError, lib.core.ArrowException) as problem:
        text = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise UsageProblem(f"{path}: no whole {FORMAT} file ({text}); export the run again") from None
    except OSError as problem:  # also what pyarrow raises for pages that do not decompress
        if problem.strerror is None:
            text = str(problem).splitlines()[0]
            raise UsageProblem(f"{path}: no whole {FORMAT} file ({text}); export the run again") from None
        raise UsageProblem(f"{path}: cannot be read: {problem.strerror}") from None


def _look(path: Path) -> None:
    """Tell what is no Parquet from what is half of one."""
    if path.is_dir():
        raise UsageProblem(f"{path}: is a folder; name one raw file")
    with path.open("rb") as file:
        start = file.read(4)
    if start == _ZIP:
        raise UsageProblem(
            f"{path}: {FORMAT} of version 1, a zip of numpy arrays; this version reads {FORMAT} {VERSION}, which is "
            "Parquet: export the run again"
        )
    if start != MAGIC:
        raise UsageProblem(f"{path}: no whole {FORMAT} file (it does not start as Parquet: {start!r})")


def _checked(file: Any, schema: Any, path: Path) -> Mapping[str, Any]:
    """The header, once format, version and columns are as they must be."""
    said = (file.metadata.metadata or {}).get(KEY)
    if said is None:
        names = ", ".join(file.schema_arrow.names[:6])
        raise UsageProblem(
            f"{path}: Parquet, but no {FORMAT} file: no key {KEY.decode()!r} (columns: {names})"
        )
    header = orjson.loads(said)
    found = header.get("format"), header.get("version")
    if found != (FORMAT, VERSION):
        raise UsageProblem(f"{path}: {found[0]} of version {found[1]}; this version reads {FORMAT} {VERSION}")
    there = {field.name: field.type for field in file.schema_arrow}
    for field in schema:
        if there.get(field.name) != field.type:
            raise ValueError(f"column {field.name!r} is {there.get(field.name)}, want {field.type}")
    checked: Mapping[str, Any] = header
    return checked


def _cell(head: Mapping[str, Any], rows: list[dict[str, Any]]) -> RawCell:
    clock = dict(head["clock"])
    clock["warnings"] = tuple(clock["warnings"])
    clock["client_cpu_s"] = float(clock["client_cpu_s"])
    return RawCell(
        topology=head["topology"],
        launch=head["launch"],
        cell=head["cell"],
        outcome=CellOutcome.from_json(head["outcome"]),
        records=CellRecords(requests=tuple(_request(row) for row in rows), **clock),
    )


def _request(row: dict[str, Any]) -> RequestRecord:
    values = {name: value for name, value in row.items() if name not in IDENTITY}
    values["status"] = Status(values["status"])
    for column in COLUMNS:
        if column.many:
            values[column.name] = tuple(values[column.name])
    made = RequestRecord(**values)
    if not len(made.event_ns) == len(made.event_lag_ns) == len(made.event_tokens):
        raise ValueError(f"request {made.index}: its events have stamps, lags and tokens of unequal number")
    return made
