"""Every launch that was ever measured, one JSON line each: what baselines are explained with and creep is
found in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .baseline import Launch, loads_strict
from .fingerprint import BaselineKey, CellRef
from .verdict import Verdict


class HistoryEntry(BaseModel):
    """One launch of one cell, with its key, its verdict and its environment. INVALID launches may have no
    values.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    key: BaselineKey
    workload: str
    cell: str
    workload_digest: str
    verdict: Verdict
    notes: tuple[str, ...] = ()
    session: str = ""
    """Run id: launches of one session share the night."""
    launch: Launch | None = None
    launch_id: str = Field(min_length=1)

    @property
    def ref(self) -> CellRef:
        """The cell this launch measured."""
        return CellRef(self.workload, self.cell, self.workload_digest)


@dataclass(frozen=True, slots=True)
class HistoryRead:
    """What a history file holds, and the lines that could not be read: shown, never silently dropped."""

    entries: tuple[HistoryEntry, ...]
    problems: tuple[str, ...]


def history_path(root: Path, key: BaselineKey) -> Path:
    """`history/<gpu>x<n>/<engine>/<model>/<topology>.jsonl`."""
    return root.joinpath(*key.place.parts).with_name(key.place.name + ".jsonl")


def to_line(entry: HistoryEntry) -> str:
    """One strict JSON line (no NaN), without the newline."""
    return json.dumps(entry.model_dump(mode="json"), sort_keys=True, allow_nan=False)


def read_history(path: Path) -> HistoryRead:
    """Entries in the order of their dates; a file that does not exist holds none."""
    entries: list[HistoryEntry] = []
    problems: list[str] = []
    if not path.exists():
        return HistoryRead((), ())
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entries.append(HistoryEntry.model_validate(loads_strict(line)))
        except (ValueError, ValidationError) as error:
            problems.append(f"{path}:{number}: {str(error).splitlines()[0]}")
    return HistoryRead(tuple(_by_date(entries)), tuple(problems))


def _by_date(entries: Sequence[HistoryEntry]) -> list[HistoryEntry]:
    dated = [entry for entry in entries if entry.launch is not None]
    bare = [entry for entry in entries if entry.launch is None]
    return sorted(dated, key=lambda e: (e.launch.date if e.launch else None, e.launch_id)) + bare
