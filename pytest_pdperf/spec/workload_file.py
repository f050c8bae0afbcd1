"""People write a workload as a few shapes and concurrencies; this turns that short form into cells.

A file is one group, or a list `groups` of them over shared defaults. A group is either a matrix (`shapes`
times `concurrency` and `arrivals`, one cell each) or a mix (`streams`, all in one cell).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from .document import Document, Key
from .topology import Frozen
from .trace import digest, read_trace
from .validation import suggestion, validate
from .workload import Arrival, Cell, ClosedLoop, OpenLoop, Slo, Stream, TraceReplay, Workload

MAX_TOKENS = 10_000_000
MAX_REQUESTS = 1_000_000
MAX_CONCURRENCY = 65_536

_SHAPE = re.compile(r"\s*([0-9]{1,8})\s*(?:(?:-|\.\.)\s*([0-9]{1,8}))?\s*/\s*([0-9]{1,8})\s*\Z")

Concurrency = int | list[int]


class ArrivalForm(Frozen):
    """An open loop (`rate_rps`) or a trace (`trace`)."""

    rate_rps: float | None = Field(default=None, gt=0, le=1e6)
    process: Literal["constant", "poisson", "gamma"] | None = None
    burstiness: float | None = Field(default=None, gt=0, le=1e3)
    ramp_to_rps: float | None = Field(default=None, gt=0, le=1e6)
    trace: str | None = None
    speed: float | None = Field(default=None, gt=0, le=1e6)

    @model_validator(mode="after")
    def _one_kind(self) -> ArrivalForm:
        if (self.rate_rps is None) == (self.trace is None):
            raise ValueError(
                "an arrival needs exactly one of rate_rps (requests a second) and trace (a file)"
            )
        if self.trace is not None and (self.process or self.burstiness or self.ramp_to_rps):
            raise ValueError("process, burstiness and ramp_to_rps go with rate_rps, not with a trace")
        if self.trace is None and self.speed is not None:
            raise ValueError("speed goes with a trace, not with rate_rps")
        if self.burstiness is not None and self.process != "gamma":
            raise ValueError("burstiness needs process: gamma")
        return self


class StreamForm(Frozen):
    """One traffic class of a mix."""

    shape: str | None = None
    requests: int | None = Field(default=None, ge=1, le=MAX_REQUESTS)
    concurrency: int | None = Field(default=None, ge=1, le=MAX_CONCURRENCY)
    think_s: float = Field(default=0.0, ge=0, le=3600)
    arrival: ArrivalForm | None = None

    @model_validator(mode="after")
    def _one_arrival(self) -> StreamForm:
        if (self.concurrency is None) == (self.arrival is None):
            raise ValueError("a stream needs exactly one of concurrency and arrival")
        if self.arrival is not None and self.think_s:
            raise ValueError("think_s goes with concurrency, not with arrival")
        return self


class GroupForm(Frozen):
    """A matrix of cells or one mixed cell. Keys that also stand at the top of the file override it."""

    id: str | None = None
    shapes: str | list[str] | None = None
    concurrency: Concurrency | None = None
    arrivals: list[ArrivalForm] | None = None
    requests: int | dict[str, int] | None = None
    think_s: float = Field(default=0.0, ge=0, le=3600)
    streams: dict[str, StreamForm] | None = None
    warmups: int | None = Field(default=None, ge=0, le=10_000)
    slo: Slo | None = None
    timeout_s: float | None = Field(default=None, gt=0, le=86_400)


class WorkloadForm(GroupForm):
    """A whole workload file."""

    description: str = ""
    groups: list[GroupForm] | None = None


def read_workload(document: Document, name: str, folder: Path) -> Workload:
    """Cells of a workload file; traces are looked up from `folder`. Raises UsageProblem."""
    form = validate(WorkloadForm, document.data, document)
    if form.groups is not None:
        for key in ("shapes", "streams", "concurrency", "arrivals", "requests", "id", "think_s"):
            if key in document.data:
                raise document.problem((key,), "goes inside the groups when a file has groups")
        if not form.groups:
            raise document.problem(("groups",), "must not be empty")
        placed: list[tuple[tuple[Key, ...], GroupForm]] = [
            (("groups", i), g) for i, g in enumerate(form.groups)
        ]
    else:
        placed = [((), form)]
    cells: list[Cell] = []
    first: dict[str, int] = {}
    for loc, group in placed:
        for cell in _Group(document, name, folder, form, group, loc).cells():
            if cell.id in first:
                raise document.problem(loc, f"cell {cell.id!r} is already defined on line {first[cell.id]}")
            first[cell.id] = document.line(loc)
            cells.append(cell)
    return Workload(name=name, description=form.description.strip(), cells=tuple(cells))


class _Group:
    """One group with its defaults resolved and its place in the file at hand."""

    def __init__(
        self,
        document: Document,
        name: str,
        folder: Path,
        top: WorkloadForm,
        group: GroupForm,
        loc: tuple[Key, ...],
    ) -> None:
        self.document, self.name, self.folder, self.group, self.loc = document, name, folder, group, loc
        chosen = {
            key: _first(getattr(group, key), getattr(top, key)) for key in ("warmups", "slo", "timeout_s")
        }
        self.common: dict[str, object] = {key: value for key, value in chosen.items() if value is not None}

    def cells(self) -> list[Cell]:
        group = self.group
        if (group.shapes is None) == (group.streams is None):
            traces_only = group.shapes is None and group.arrivals and all(a.trace for a in group.arrivals)
            if not traces_only:
                raise self.document.problem(
                    self.loc, "needs exactly one of shapes (a matrix) and streams (a mix)"
                )
        return [self._mix(group.streams)] if group.streams is not None else self._matrix()

    def _matrix(self) -> list[Cell]:
        group = self.group
        for key in ("id",):
            if getattr(group, key) is not None:
                raise self.document.problem(
                    (*self.loc, key), "belongs to a mix (streams); a matrix names its own cells"
                )
        levels = self._levels()
        if not levels and not group.arrivals:
            raise self.document.problem(
                self.loc, "shapes need concurrency (closed loop) or arrivals (open loop)"
            )
        if group.think_s and not levels:
            raise self.document.problem((*self.loc, "think_s"), "goes with concurrency")
        wanted = self._requests(levels)
        given = [group.shapes] if isinstance(group.shapes, str) else group.shapes or []
        if group.shapes is not None and not given:
            raise self.document.problem((*self.loc, "shapes"), "must not be empty")
        shapes = []
        for i, text in enumerate(given):
            place: tuple[Key, ...] = (
                (*self.loc, "shapes") if isinstance(group.shapes, str) else (*self.loc, "shapes", i)
            )
            shapes.append(self._shape(text, place))
        cells = []
        for lengths, output in shapes:
            for level in levels:
                arrival = ClosedLoop(concurrency=level, think_s=group.think_s)
                cells.append(self._cell(lengths, output, wanted[level], arrival))
            for form in group.arrivals or []:
                if form.trace is None:
                    cells.append(self._cell(lengths, output, wanted[0], _open_loop(form)))
        for i, form in enumerate(group.arrivals or []):
            if form.trace is not None:
                limit = wanted[0] if group.requests is not None else None
                stream = self._trace("main", form, limit, (*self.loc, "arrivals", i, "trace"))
                cells.append(self._make(_arrival_id(stream.arrival), (stream,)))
        return cells

    def _mix(self, streams: Mapping[str, StreamForm]) -> Cell:
        for key in ("concurrency", "arrivals", "requests", "think_s"):
            if key in self.group.model_fields_set:
                raise self.document.problem((*self.loc, key), "belongs inside each of the streams")
        if not streams:
            raise self.document.problem((*self.loc, "streams"), "must not be empty")
        made = []
        for name, form in streams.items():
            place = (*self.loc, "streams", name)
            if form.arrival is not None and form.arrival.trace is not None:
                if form.shape is not None:
                    raise self.document.problem((*place, "shape"), "a trace brings its own lengths")
                made.append(self._trace(name, form.arrival, form.requests, (*place, "arrival", "trace")))
                continue
            for key in ("shape", "requests"):
                if getattr(form, key) is None:
                    raise self.document.problem((*place, key), "this key is missing")
            assert form.shape is not None and form.requests is not None
            lengths, output = self._shape(form.shape, (*place, "shape"))
            if form.arrival is not None:
                arrival: Arrival = _open_loop(form.arrival)
            else:
                assert form.concurrency is not None
                self._filled(form.requests, form.concurrency, (*place, "requests"))
                arrival = ClosedLoop(concurrency=form.concurrency, think_s=form.think_s)
            made.append(
                Stream(
                    name=name,
                    input_tokens=lengths,
                    output_tokens=output,
                    requests=form.requests,
                    arrival=arrival,
                )
            )
        return self._make(self.group.id or self.name, tuple(made))

    def _cell(self, lengths: tuple[int, int], output: int, requests: int, arrival: Arrival) -> Cell:
        low, high = lengths
        span = str(low) if low == high else f"{low}-{high}"
        stream = Stream(input_tokens=lengths, output_tokens=output, requests=requests, arrival=arrival)
        return self._make(f"in{span}-out{output}-{_arrival_id(arrival)}", (stream,))

    def _make(self, cell_id: str, streams: tuple[Stream, ...]) -> Cell:
        try:
            return Cell.model_validate(
                {"workload": self.name, "id": cell_id, "streams": streams, **self.common}
            )
        except ValueError as error:
            detail = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)
            raise self.document.problem(self.loc, f"cell {cell_id!r}: {detail}") from None

    def _trace(self, name: str, form: ArrivalForm, limit: int | None, loc: tuple[Key, ...]) -> Stream:
        assert form.trace is not None
        path = (self.folder / form.trace).resolve()
        if not path.is_file():
            known = [str(p.relative_to(self.folder)) for p in sorted(self.folder.glob("**/*.jsonl"))]
            raise self.document.problem(
                loc, f"no trace {form.trace!r} beside the workload{suggestion(form.trace, known)}"
            )
        requests = read_trace(path, limit)
        if limit is not None and len(requests) < limit:
            raise self.document.problem(loc, f"the trace has {len(requests)} requests, {limit} are asked for")
        lengths = [r.input_tokens for r in requests]
        return Stream(
            name=name,
            input_tokens=(min(lengths), max(lengths)),
            output_tokens=max(r.output_tokens for r in requests),
            requests=len(requests),
            arrival=TraceReplay(
                path=str(path), sha256=digest(requests), speed=1.0 if form.speed is None else form.speed
            ),
        )

    def _levels(self) -> list[int]:
        given = self.group.concurrency
        if given is None:
            return []
        levels = [given] if isinstance(given, int) else given
        for i, level in enumerate(levels):
            loc = (*self.loc, "concurrency") if isinstance(given, int) else (*self.loc, "concurrency", i)
            if not 1 <= level <= MAX_CONCURRENCY:
                raise self.document.problem(loc, f"must be 1 to {MAX_CONCURRENCY}, got {level}")
            if level in levels[:i]:
                raise self.document.problem(loc, f"{level} is named twice")
        if not levels:
            raise self.document.problem((*self.loc, "concurrency"), "must not be empty")
        return levels

    def _requests(self, levels: Sequence[int]) -> dict[int, int]:
        """Requests for each concurrency; key 0 is for arrivals. Left out: 32, or 4 a client if more."""
        given, loc = self.group.requests, (*self.loc, "requests")
        wanted = {0: 32} | {level: max(32, 4 * level) for level in levels}
        if isinstance(given, int):
            wanted = dict.fromkeys(wanted, given)
        elif given is not None:
            wanted = self._requests_table(given, levels)
        for level, count in wanted.items():
            key = str(level)
            place = (*loc, key if key in given else "default") if isinstance(given, dict) else loc
            if not 1 <= count <= MAX_REQUESTS:
                raise self.document.problem(place, f"must be 1 to {MAX_REQUESTS}, got {count}")
            self._filled(count, level, place)
        return wanted

    def _requests_table(self, given: Mapping[str, int], levels: Sequence[int]) -> dict[int, int]:
        loc = (*self.loc, "requests")
        known = ["default", *(str(level) for level in levels)]
        for key in given:
            if key not in known:
                raise self.document.problem(
                    (*loc, key), f"{key!r} is not a concurrency of this group{suggestion(key, known)}"
                )
        wanted: dict[int, int] = {}
        for level in levels:
            count = given.get(str(level), given.get("default"))
            if count is None:
                raise self.document.problem(
                    loc, f"says nothing for concurrency {level}; add `{level}:` or `default:`"
                )
            wanted[level] = count
        if "default" in given:
            wanted[0] = given["default"]
        elif self.group.arrivals:
            raise self.document.problem(loc, "says nothing for arrivals; add `default:`")
        return wanted

    def _filled(self, requests: int, concurrency: int, loc: Sequence[Key]) -> None:
        if requests < concurrency:
            raise self.document.problem(
                loc,
                f"{requests} requests can never keep {concurrency} clients busy; use at least {concurrency}",
            )

    def _shape(self, text: str, loc: Sequence[Key]) -> tuple[tuple[int, int], int]:
        match = _SHAPE.match(text)
        if match is None:
            raise self.document.problem(
                loc, f"{text!r} is not a shape; write input/output tokens, e.g. 512/256 or 4096-8192/64"
            )
        low, output = int(match[1]), int(match[3])
        high = int(match[2]) if match[2] else low
        if low < 1 or output < 1 or high > MAX_TOKENS or output > MAX_TOKENS:
            raise self.document.problem(loc, f"token counts of {text!r} must be 1 to {MAX_TOKENS}")
        if high < low:
            raise self.document.problem(loc, f"{text!r} runs backwards; write {high}-{low}/{output}")
        return (low, high), output


def _first(*values: object) -> object:
    return next((value for value in values if value is not None), None)


def _open_loop(form: ArrivalForm) -> OpenLoop:
    assert form.rate_rps is not None
    return OpenLoop(
        rate_rps=form.rate_rps,
        process=form.process or "poisson",
        burstiness=1.0 if form.burstiness is None else form.burstiness,
        ramp_to_rps=form.ramp_to_rps,
    )


def _arrival_id(arrival: Arrival) -> str:
    if isinstance(arrival, ClosedLoop):
        return f"c{arrival.concurrency}" + (f"-think{arrival.think_s:g}s" if arrival.think_s else "")
    if isinstance(arrival, TraceReplay):
        return f"trace-{Path(arrival.path).stem}" + (f"-x{arrival.speed:g}" if arrival.speed != 1 else "")
    ramp = f"to{arrival.ramp_to_rps:g}" if arrival.ramp_to_rps is not None else ""
    shape = f"-b{arrival.burstiness:g}" if arrival.process == "gamma" else ""
    return f"{arrival.process}{arrival.rate_rps:g}{ramp}rps{shape}"
