"""Every event of a run in one compact file that numpy alone can read: for those who want other statistics than ours.

The layout is described in docs/reference/raw-format.md; a change of it raises VERSION.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from pytest_pdperf import __version__
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.measure.records import CellRecords, RequestRecord, Status
from pytest_pdperf.report.outcomes import CellOutcome
from pytest_pdperf.report.source import Run

from .chosen import Chosen

Ints = NDArray[np.int64]

FORMAT = "pdperf-raw"
VERSION = 1
UNKNOWN = np.iinfo(np.int64).min
"""Stands for None in integer columns: a time of 0 or -1 could be one."""
_TIMES = ("sent_ns", "scheduled_ns", "end_ns")
_EVENTS = ("event_ns", "event_lag_ns", "event_tokens")
_COLUMNS = tuple(f.name for f in fields(RequestRecord) if f.name not in (*_TIMES, *_EVENTS, "token_ids"))
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Date of all members, so that equal runs give equal files."""


@dataclass(frozen=True, slots=True)
class RawCell:
    """One cell of a raw file."""

    topology: str
    launch: int
    cell: str
    outcome: CellOutcome
    records: CellRecords


def write_raw(run: Run, cells: Iterable[Chosen], path: Path) -> list[str]:
    """Write all cells that have records; returns a line for each that has none.

    One cell is in memory at a time. A crash leaves the old file or none. Raises UsageProblem when no cell has
    records or the file cannot be written.
    """
    part = path.with_name(path.name + ".part")
    left_out: list[str] = []
    heads: list[dict[str, Any]] = []
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
            for chosen in cells:
                if chosen.records is None:
                    left_out.append(f"{chosen.name}: left out, {chosen.missing}")
                    continue
                heads.append(_head(chosen, chosen.records))
                for name, values in _arrays(chosen.records).items():
                    _put(archive, f"c{len(heads) - 1}/{name}", values)
            header = {
                "format": FORMAT,
                "version": VERSION,
                "written_by": f"pytest-pdperf {__version__}",
                "run": run.name,
                "cells": heads,
            }
            _put(archive, "header", np.frombuffer(orjson.dumps(header), dtype=np.uint8))
        if not heads:
            raise UsageProblem(f"{run.name}: no cell has records of single requests: {'; '.join(left_out)}")
        part.replace(path)
    except OSError as problem:
        raise UsageProblem(f"{path}: cannot be written: {problem.strerror or problem}") from None
    finally:
        part.unlink(missing_ok=True)
    return left_out


def _head(chosen: Chosen, records: CellRecords) -> dict[str, Any]:
    clock = {f.name: getattr(records, f.name) for f in fields(CellRecords) if f.name != "requests"}
    return {
        "topology": chosen.outcome.topology,
        "launch": chosen.outcome.launch,
        "cell": chosen.outcome.result.cell,
        "requests": len(records.requests),
        "clock": clock,
        "outcome": chosen.outcome.to_json(),
        "columns": {name: [getattr(r, name) for r in records.requests] for name in _COLUMNS},
    }


def _arrays(records: CellRecords) -> dict[str, Ints]:
    """Times as they are, events as differences: small numbers are what makes the file small."""
    requests = records.requests
    for request in requests:
        if {len(getattr(request, name)) for name in _EVENTS} != {len(request.event_ns)}:
            raise ValueError(
                f"request {request.index}: its events have stamps, lags and tokens of unequal number"
            )
    steps = [np.diff(np.asarray((r.sent_ns, *r.event_ns), dtype=np.int64)) for r in requests]
    return {
        **{name: _column([getattr(r, name) for r in requests]) for name in _TIMES},
        "events": _column([len(r.event_ns) for r in requests]),
        "event_step_ns": np.concatenate(steps) if steps else _column([]),
        "event_lag_ns": _column([lag for r in requests for lag in r.event_lag_ns]),
        "event_tokens": _column([tokens for r in requests for tokens in r.event_tokens]),
        "token_id_count": _column([len(r.token_ids) for r in requests]),
        "token_ids": _column([token for r in requests for token in r.token_ids]),
    }


def _column(values: Iterable[int | None]) -> Ints:
    return np.asarray([UNKNOWN if v is None else v for v in values], dtype=np.int64)


def _put(archive: zipfile.ZipFile, name: str, values: NDArray[Any]) -> None:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, values, allow_pickle=False)
    member = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
    member.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(member, buffer.getvalue())


def read_raw(path: Path) -> Iterator[RawCell]:
    """The cells of a raw file, one in memory at a time.

    Raises UsageProblem for what is no such file, is damaged, or has another version (saying which).
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            header = orjson.loads(archive["header"].tobytes())
            _check(header, path)
            for number, head in enumerate(header["cells"]):
                yield _cell(head, archive, f"c{number}")
    except OSError as problem:
        raise UsageProblem(f"{path}: cannot be read: {problem.strerror or problem}") from None
    except (KeyError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as problem:
        raise UsageProblem(f"{path}: no whole {FORMAT} file ({problem}); export the run again") from None


def _check(header: Any, path: Path) -> None:
    found = header.get("format"), header.get("version")
    if found != (FORMAT, VERSION):
        raise UsageProblem(f"{path}: {found[0]} of version {found[1]}; this version reads {FORMAT} {VERSION}")


def _cell(head: dict[str, Any], archive: Any, name: str) -> RawCell:
    columns: dict[str, Any] = head["columns"]
    array = {key: archive[f"{name}/{key}"] for key in (*_TIMES, "events", "token_id_count")}
    steps, lags, tokens, ids = (
        archive[f"{name}/{key}"] for key in ("event_step_ns", "event_lag_ns", "event_tokens", "token_ids")
    )
    ends, id_ends = np.cumsum(array["events"]), np.cumsum(array["token_id_count"])
    total = int(ends[-1]) if ends.size else 0
    if not len(steps) == len(lags) == len(tokens) == total or len(ids) != (
        int(id_ends[-1]) if ids.size else 0
    ):
        raise ValueError(f"{name}: its events are not as many as its requests say")
    requests = []
    for i in range(head["requests"]):
        span = slice(int(ends[i] - array["events"][i]), int(ends[i]))
        sent = int(array["sent_ns"][i])
        values = {key: columns[key][i] for key in _COLUMNS}
        values["status"] = Status(values["status"])
        requests.append(
            RequestRecord(
                **values,
                **{key: _known(array[key][i]) for key in _TIMES},
                event_ns=tuple((sent + np.cumsum(steps[span])).tolist()),
                event_lag_ns=tuple(lags[span].tolist()),
                event_tokens=tuple(tokens[span].tolist()),
                token_ids=tuple(ids[int(id_ends[i] - array["token_id_count"][i]) : int(id_ends[i])].tolist()),
            )
        )
    clock = head["clock"] | {"warnings": tuple(head["clock"]["warnings"])}
    return RawCell(
        topology=head["topology"],
        launch=head["launch"],
        cell=head["cell"],
        outcome=CellOutcome.from_json(head["outcome"]),
        records=CellRecords(requests=tuple(requests), **clock),
    )


def _known(value: Any) -> Any:
    return None if value == UNKNOWN else int(value)
