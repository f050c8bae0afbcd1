"""The spread of real launches is taken from what is stored: accepted, on GPUs, each launch once."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path

import pytest

from benchmarks.gate import observed, speed
from benchmarks.gate.noise import SERIES
from pytest_pdperf.gate.fingerprint import BaselineKey, CellRef
from pytest_pdperf.gate.history import HistoryEntry
from pytest_pdperf.gate.store import BaselineStore
from pytest_pdperf.gate.update import Mode, Outcome
from pytest_pdperf.gate.verdict import CellVerdict, Verdict
from pytest_pdperf.measure.table import METRICS
from tests.unit.gate.gate_tables import KEY, REF, START, launch

NEW = CellVerdict((), Verdict.NO_BASELINE)


def store(root: Path, day: int, tpot: float, key: BaselineKey = KEY, ref: CellRef = REF) -> None:
    kept = Outcome(key, ref, NEW, launch({"tpot_ms_p50": tpot}, day=day))
    BaselineStore(root / "baselines", METRICS).update([kept], Mode.AUTO, "test", START + timedelta(days=day))


def remember(
    root: Path, day: int, tpot: float, verdict: Verdict = Verdict.PASS, key: BaselineKey = KEY
) -> None:
    one = launch({"tpot_ms_p50": tpot}, day=day)
    entry = HistoryEntry(
        key=key,
        workload=REF.workload,
        cell=REF.cell,
        workload_digest=REF.digest,
        verdict=verdict,
        launch=one,
        launch_id=one.id,
    )
    BaselineStore(root / "baselines", METRICS).append_history([entry])


def test_variances_are_pooled_over_series_and_not_across_them(tmp_path: Path) -> None:
    other = CellRef(REF.workload, "in4096-out128-c1", "w1")
    for day, factor in enumerate((1.0, 1.1)):
        store(tmp_path, day, 10 * factor)
        store(tmp_path, day, 100 * factor, ref=other)
    found = observed.spread(observed.readings(tmp_path))
    assert found is not None
    assert (found.freedom, found.series) == (2, 2)
    assert found.sd == pytest.approx(math.log(1.1) / math.sqrt(2), rel=1e-3)


def test_history_adds_launches_once_and_leaves_out_red_cpu_and_simulated_ones(tmp_path: Path) -> None:
    store(tmp_path, 0, 10.0)
    remember(tmp_path, 0, 10.0)
    remember(tmp_path, 1, 10.2)
    remember(tmp_path, 2, 30.0, Verdict.FAIL)
    remember(tmp_path, 3, 30.0, key=KEY.model_copy(update={"gpu": "cpu x"}))
    remember(tmp_path, 4, 30.0, key=KEY.model_copy(update={"simulated": True}))
    assert sorted(row.value for row in observed.readings(tmp_path)) == [10.0, 10.2]
    assert observed.spread(observed.readings(tmp_path), within_session=True) is not None


def test_the_command_prints_each_metric_with_its_prior(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(tmp_path, 0, 10.0)
    assert observed.main(["--root", str(tmp_path)]) == 1
    assert "nothing to estimate" in capsys.readouterr().out
    store(tmp_path, 1, 10.1)
    assert observed.main(["--root", str(tmp_path)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("tpot_ms_p50"))
    assert line.split()[1:5] == ["0.0070", "1", "1", f"{METRICS['tpot_ms_p50'].prior_sd:.3f}"]


def test_what_is_stored_in_this_repository_can_be_read() -> None:
    rows = observed.readings(observed.ROOT)
    assert {row.metric for row in rows} >= {"ttft_ms_p50", "tpot_ms_p50", "output_tps"}
    assert observed.spread(rows) is not None


def test_a_session_of_96_series_is_judged_whole(tmp_path: Path) -> None:
    root = tmp_path / "baselines"
    timing = speed.judge_session(root, speed.prepare(root, launches=3))
    assert timing.rows == SERIES and timing.seconds > 0
