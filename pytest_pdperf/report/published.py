"""Tables that others published, as files of our own: for side-by-side reports, never for gating."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.measure.cell_result import CellResult, MetricValue
from pytest_pdperf.measure.table import METRICS

from .outcomes import CellOutcome

SCHEMA = 1
Value = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PublishedCell(_Strict):
    """One cell as its publisher gives it: only what was published."""

    topology: str = Field(min_length=1)
    kind: Literal["pd", "aggregated"]
    cell: str = Field(min_length=1)
    """Id as our workloads spell it, so that equal cells stand beside each other: `in512-out256-c16`."""
    requests: int | None = Field(default=None, ge=0)
    ok: int | None = Field(default=None, ge=0)
    metrics: dict[str, Value] = Field(min_length=1)
    """Metric id of our table -> value in that table's unit."""
    note: str = ""


class PublishedTable(_Strict):
    """A published table with its source."""

    schema_version: Literal[1] = Field(alias="schema")
    name: str = Field(min_length=1)
    source: str = Field(min_length=1)
    facts: dict[str, str] = Field(default_factory=dict)
    cells: tuple[PublishedCell, ...] = Field(min_length=1)

    def outcomes(self) -> tuple[CellOutcome, ...]:
        """The table as if it were a run without verdicts.

        `n` is the number of requests for what is one a request, and 0 (not said) for gaps between tokens.
        """
        return tuple(self._outcome(number, cell) for number, cell in enumerate(self.cells))

    def _outcome(self, order: int, cell: PublishedCell) -> CellOutcome:
        count = cell.ok or cell.requests or 0
        return CellOutcome(
            nodeid=f"{self.name}/{cell.topology}/{cell.cell}",
            order=order,
            topology=cell.topology,
            kind=cell.kind,
            engine="published",
            launch=1,
            verdict="",
            rows=(cell.note,) if cell.note else (),
            evidence="unknown" if cell.kind == "pd" else "not_applicable",
            result=CellResult(
                topology=cell.topology,
                workload=self.name,
                cell=cell.cell,
                metrics={
                    name: MetricValue(value, 0 if name.startswith("itl_") else count, cell.note)
                    for name, value in cell.metrics.items()
                },
                requests=cell.requests or 0,
                ok=cell.ok or 0,
            ),
        )


def read_published(path: Path) -> PublishedTable:
    """Read and check one table. Raises UsageProblem that names file, place and fault."""
    try:
        table = PublishedTable.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageProblem(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageProblem(f"{path}: not a published table: {where}: {first['msg']}") from None
    for cell in table.cells:
        unknown = [name for name in cell.metrics if name not in METRICS]
        if unknown:
            raise UsageProblem(f"{path}: {cell.topology} {cell.cell}: no metric is called {unknown[0]!r}")
    return table
