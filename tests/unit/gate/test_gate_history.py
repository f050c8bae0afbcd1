"""History: every launch of every night, whatever became of it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from pytest_pdperf.gate.history import HistoryEntry, history_path, read_history
from pytest_pdperf.gate.store import BaselineStore
from pytest_pdperf.gate.verdict import Verdict
from tests.unit.gate.gate_tables import CATALOGUE, KEY, REF, START, launch


def entry(day: int, tps: float | None = 1000.0, verdict: Verdict = Verdict.PASS) -> HistoryEntry:
    return HistoryEntry(
        key=KEY,
        workload=REF.workload,
        cell=REF.cell,
        workload_digest=REF.digest,
        verdict=verdict,
        launch_id=f"run-{day}",
        session=f"s{day}",
        launch=launch({"output_tps": tps}, day=day) if tps is not None else None,
    )


def test_history_keeps_every_launch_in_the_order_of_its_date(root: Path, tmp_path: Path) -> None:
    store = BaselineStore(root, CATALOGUE)
    store.append_history([entry(3), entry(1)])
    (path,) = store.append_history([entry(2), entry(4, None, Verdict.INVALID)])
    assert path == history_path(tmp_path / "history", KEY)
    found = read_history(path)
    assert [one.launch_id for one in found.entries] == ["run-1", "run-2", "run-3", "run-4"]
    assert found.entries[-1].verdict is Verdict.INVALID and found.entries[0].ref == REF
    assert not found.problems
    assert store.append_history([]) == []


def test_half_a_line_spoils_only_itself(root: Path) -> None:
    store = BaselineStore(root, CATALOGUE)
    (path,) = store.append_history([entry(1), entry(2)])
    path.write_text(path.read_text()[:-40])
    store.append_history([entry(3)])
    found = read_history(path)
    assert [one.launch_id for one in found.entries] == ["run-1", "run-3"]
    assert len(found.problems) == 1 and f"{path}:2" in found.problems[0]


def test_history_refuses_what_is_not_finite(root: Path) -> None:
    (path,) = BaselineStore(root, CATALOGUE).append_history([entry(1)])
    path.write_text(path.read_text().replace("1000.0", "NaN"))
    found = read_history(path)
    assert found.entries == () and "NaN" in found.problems[0]
    assert read_history(path.with_name("none.jsonl")).entries == ()


def test_dates_are_kept_in_utc() -> None:
    local = datetime.fromisoformat("2025-03-01T04:00:00.123+02:00")
    assert launch({"output_tps": 1.0}).model_copy(update={}).date == START
    made = type(launch({"output_tps": 1.0}))(
        id="x", date=local, values={"output_tps": 1.0}, n={"output_tps": 1}
    )
    assert made.model_dump(mode="json")["date"] == "2025-03-01T02:00:00Z"
