"""The store: updates that touch what was selected, lose nothing to each other, and never leave half a file."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.gate import store as module
from pytest_pdperf.gate.baseline import BaselineProblem
from pytest_pdperf.gate.fingerprint import BaselineKey, CellRef
from pytest_pdperf.gate.store import LOCK_NAME, BaselineStore, write_atomically
from pytest_pdperf.gate.update import Action, Change, Mode, Outcome
from pytest_pdperf.gate.verdict import CellVerdict, Verdict, VerdictRow
from tests.unit.gate.gate_tables import CATALOGUE, KEY, REF, START, judged, launch, measured


class Night:
    """Measures, judges and stores one cell at a time, as a session would."""

    def __init__(self, root: Path, key: BaselineKey = KEY, ref: CellRef = REF) -> None:
        self.root, self.key, self.ref = root, key, ref

    def verdict(self, tps: float) -> CellVerdict:
        store = BaselineStore(self.root, CATALOGUE)
        return judged(measured({"output_tps": tps}), store.find(self.key, self.ref))

    def outcome(self, tps: float, day: float, verdict: CellVerdict | None = None) -> Outcome:
        return Outcome(self.key, self.ref, verdict or self.verdict(tps), launch({"output_tps": tps}, day=day))

    def store(
        self,
        tps: float,
        day: float,
        mode: Mode = Mode.AUTO,
        reason: str = "",
        verdict: CellVerdict | None = None,
    ) -> Change:
        (change,) = BaselineStore(self.root, CATALOGUE).update(
            [self.outcome(tps, day, verdict)], mode, reason, START + timedelta(days=day)
        )
        return change

    @property
    def values(self) -> list[float]:
        found = BaselineStore(self.root, CATALOGUE).find(self.key, self.ref)
        return list(found.values("output_tps")) if found else []

    @property
    def text(self) -> str:
        return BaselineStore(self.root, CATALOGUE).path_of(self.key).read_text()


def bare(verdict: Verdict) -> CellVerdict:
    return CellVerdict((VerdictRow("cell", verdict, note="because"),), verdict)


def test_path_names_hardware_engine_model_and_topology(root: Path) -> None:
    path = BaselineStore(root, CATALOGUE).path_of(KEY)
    assert path.relative_to(root).as_posix() == "nvidia-h100-80gb-hbm3x6/vllm/qwen-qwen3-32b/pd-1p2d-tp2.json"


def test_a_first_launch_creates_and_a_passing_one_is_added(root: Path) -> None:
    night = Night(root)
    assert night.store(1000.0, 0).action is Action.CREATED
    change = night.store(1010.0, 1)
    assert change.action is Action.ADDED
    assert change.lines() == [f"{REF.id}: launch added", "  output_tps: 1,000 -> 1,005 tok/s"]
    assert night.values == [1000.0, 1010.0]


def test_a_failing_cell_needs_a_reason_and_then_the_next_identical_run_passes(root: Path) -> None:
    night = Night(root)
    night.store(1000.0, 0)
    before = night.text
    refused = night.store(800.0, 1)
    assert refused.action is Action.REFUSED and "--baseline-reason" in refused.note
    assert night.text == before
    pinned = night.store(800.0, 1, reason="vLLM 0.33 spends 20 % on safety")
    assert pinned.action is Action.PINNED
    assert "  output_tps: 1,000 -> 800.0 tok/s" in pinned.lines()
    assert night.values == [800.0]
    assert night.verdict(800.0).verdict is Verdict.PASS
    pins = json.loads(night.text)["cells"][REF.id]
    assert [pin["status"] for pin in pins] == ["current", "superseded"]
    assert pins[0]["reason"] == pins[0]["launches"][0]["reason"] == "vLLM 0.33 spends 20 % on safety"
    assert pins[1]["superseded"].startswith("2025-03-02: vLLM 0.33")
    assert pins[1]["launches"][0]["values"] == {"output_tps": 1000.0}


@pytest.mark.parametrize("verdict", [Verdict.INVALID, Verdict.INCONCLUSIVE])
@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.CREATE, Mode.FIX, Mode.TIGHTEN])
@pytest.mark.parametrize("existing", [True, False])
def test_what_cannot_be_trusted_is_never_stored(
    root: Path, verdict: Verdict, mode: Mode, existing: bool
) -> None:
    night = Night(root)
    if existing:
        night.store(1000.0, 0)
    change = night.store(1000.0, 1, mode, "please", bare(verdict))
    assert change.action is Action.REFUSED and "because" in change.note
    assert night.values == ([1000.0] if existing else [])


@pytest.mark.parametrize(
    ("mode", "tps", "reason", "action"),
    [
        (Mode.CREATE, 1000.0, "", Action.KEPT),
        (Mode.CREATE, 800.0, "why", Action.KEPT),
        (Mode.FIX, 1000.0, "why", Action.KEPT),
        (Mode.FIX, 800.0, "", Action.REFUSED),
        (Mode.FIX, 800.0, "why", Action.PINNED),
        (Mode.FIX, 1100.0, "why", Action.KEPT),
        (Mode.TIGHTEN, 1000.0, "", Action.KEPT),
        (Mode.TIGHTEN, 800.0, "why", Action.KEPT),
        (Mode.TIGHTEN, 1100.0, "", Action.PINNED),
        (Mode.TIGHTEN, 1400.0, "", Action.REFUSED),
        (Mode.TIGHTEN, 1400.0, "why", Action.PINNED),
        (Mode.AUTO, 1100.0, "", Action.KEPT),
        (Mode.AUTO, 1100.0, "why", Action.PINNED),
        (Mode.AUTO, 1000.0, "why", Action.ADDED),
    ],
)
def test_what_each_mode_touches(root: Path, mode: Mode, tps: float, reason: str, action: Action) -> None:
    night = Night(root)
    night.store(1000.0, 0)
    before = night.text
    assert night.store(tps, 1, mode, reason).action is action
    assert (night.text == before) == (action in (Action.KEPT, Action.REFUSED))


def test_an_improved_metric_beside_a_noisy_one_is_not_accepted_in_passing(root: Path) -> None:
    night = Night(root)
    night.store(1000.0, 0)
    rows = (VerdictRow("output_tps", Verdict.IMPROVED), VerdictRow("ttft_ms_p50", Verdict.NOISY))
    mixed = CellVerdict(rows, Verdict.NOISY)
    assert night.store(1100.0, 1, verdict=mixed).action is Action.KEPT
    assert night.store(1100.0, 1, Mode.TIGHTEN, verdict=mixed).action is Action.PINNED


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.CREATE])
def test_two_launches_of_one_session_make_one_pin(root: Path, mode: Mode) -> None:
    night, store = Night(root), BaselineStore(root, CATALOGUE)
    first = [night.outcome(1000.0, 0), night.outcome(1004.0, 0.01)]
    changes = store.update(first, mode, "", START + timedelta(days=1))
    assert [change.action for change in changes] == [Action.CREATED, Action.ADDED]
    assert night.values == [1000.0, 1004.0]
    if mode is Mode.AUTO:
        slower = [
            night.outcome(800.0, 2),
            night.outcome(805.0, 2.01),
            night.outcome(803.0, 2.02, bare(Verdict.INVALID)),
        ]
        changes = store.update(slower, mode, "new kernel", START + timedelta(days=3))
        assert [change.action for change in changes] == [Action.PINNED, Action.ADDED, Action.REFUSED]
        assert night.values == [800.0, 805.0]
        assert len(json.loads(night.text)["cells"][REF.id]) == 2


def test_a_noisy_cell_adds_its_launch_so_that_more_launches_can_cure_it(root: Path) -> None:
    night = Night(root)
    night.store(1000.0, 0)
    assert night.store(1000.0, 1, verdict=bare(Verdict.NOISY)).action is Action.ADDED


@pytest.mark.parametrize("mode", [Mode.FIX, Mode.TIGHTEN])
def test_fix_and_tighten_create_nothing(root: Path, mode: Mode) -> None:
    change = Night(root).store(1000.0, 0, mode, "why")
    assert change.action is Action.KEPT and "--update-baselines=create" in change.note
    assert not list(root.rglob("*.json"))


def test_only_selected_cells_are_touched(root: Path) -> None:
    first, second = Night(root), Night(root, ref=CellRef("fixed-shapes", "in4096-out128-c1", "w1"))
    first.store(1000.0, 0)
    second.store(60.0, 0)
    first.store(1010.0, 1)
    assert second.values == [60.0]
    store = BaselineStore(root, CATALOGUE)
    assert set(store.siblings(KEY, first.ref)) == {"output_tps"}
    assert store.siblings(KEY, second.ref)["output_tps"].freedom == 1
    assert store.siblings(KEY, first.ref)["output_tps"].freedom == 0


def test_the_same_launch_is_not_added_twice(root: Path) -> None:
    night = Night(root)
    night.store(1000.0, 0)
    assert "already" in night.store(1000.0, 0).note
    assert night.values == [1000.0]


def test_times_of_a_client_that_could_not_keep_up_are_never_stored(root: Path) -> None:
    night = Night(root)
    doubtful = replace(night.outcome(1000.0, 0), doubts=("the client got too little CPU",))
    (change,) = BaselineStore(root, CATALOGUE).update([doubtful], Mode.CREATE, "", START)
    assert change.action is Action.REFUSED
    assert change.note == "INCONCLUSIVE: the client got too little CPU"
    assert not night.values


def test_a_clock_that_goes_backwards_is_refused(root: Path) -> None:
    night = Night(root)
    night.store(1000.0, 5)
    late = night.store(1000.0, 1)
    assert late.action is Action.REFUSED and "before the newest" in late.note
    store = BaselineStore(root, CATALOGUE)
    (early,) = store.update([night.outcome(1000.0, 9)], Mode.AUTO, "", START + timedelta(days=7))
    assert early.action is Action.REFUSED and "in the future" in early.note


def test_slow_drift_cannot_ratchet_the_baseline(root: Path) -> None:
    """Each launch 0.7 % slower than the last and every one accepted: the sum must not pass unseen."""
    night, tps, refused, note = Night(root), 1000.0, 0.0, ""
    for day in range(40):
        change = night.store(tps, day)
        if change.action is Action.REFUSED:
            refused, note = tps, change.note
            break
        tps /= 1.007
    assert refused > 910 and "output_tps has crept" in note, f"drifted to {tps}"
    assert night.store(tps, 50, reason="accepted drift").action is Action.PINNED
    assert night.values == [float(f"{tps:.4g}")]


def test_four_percent_steps_go_red_at_the_second(root: Path) -> None:
    night, actions = Night(root), []
    for day, cost in enumerate([100, 104, 108.2, 112.5]):
        actions.append(night.store(100_000 / cost, day).action)
    assert actions == [Action.CREATED, Action.ADDED, Action.REFUSED, Action.REFUSED]


def test_hand_edits_are_refused_until_fixed(root: Path) -> None:
    night, other = Night(root), Night(root, ref=CellRef("fixed-shapes", "other", "w1"))
    night.store(1000.0, 0)
    other.store(500.0, 0)
    path = BaselineStore(root, CATALOGUE).path_of(KEY)
    path.write_text(path.read_text().replace("1000.0", "700.0").replace("500.0", "400.0"))
    with pytest.raises(BaselineProblem, match="--update-baselines=fix"):
        night.verdict(1000.0)
    with pytest.raises(BaselineProblem, match="edited by hand"):
        night.store(1000.0, 1, Mode.AUTO, "why", bare(Verdict.PASS))
    stale = BaselineStore(root, CATALOGUE, trust_edits=True).find(KEY, REF)
    assert stale is not None and stale.values("output_tps") == (700.0,)
    refused = night.store(1000.0, 1, Mode.FIX, "", bare(Verdict.IMPROVED))
    assert refused.action is Action.REFUSED
    fixed = night.store(1000.0, 1, Mode.FIX, "restored", bare(Verdict.IMPROVED))
    assert fixed.action is Action.PINNED
    with pytest.raises(BaselineProblem, match="other"):
        night.verdict(1000.0)
    other.store(500.0, 1, Mode.FIX, "restored", bare(Verdict.PASS))
    assert night.values == [1000.0] and other.values == [500.0]
    assert "edited by hand before" in night.text


def test_another_key_in_the_same_file_is_another_baseline(root: Path) -> None:
    tcp, rdma = Night(root), Night(root, key=KEY.model_copy(update={"link": "nvlink/rdma"}))
    tcp.store(1000.0, 0)
    assert rdma.verdict(1200.0).verdict is Verdict.NO_BASELINE
    rdma.store(1200.0, 1)
    assert (tcp.values, rdma.values) == ([1000.0], [1200.0])


def test_no_baseline_names_the_nearest_and_what_differs(root: Path) -> None:
    Night(root).store(1000.0, 0)
    store = BaselineStore(root, CATALOGUE)
    h200 = KEY.model_copy(update={"gpu": "NVIDIA H200"})
    assert store.find(h200, REF) is None
    text = store.nearest(h200, REF)
    assert "gpu: stored 'NVIDIA H100 80GB HBM3', now 'NVIDIA H200'" in text and "pd-1p2d-tp2.json" in text
    other_load = CellRef(REF.workload, REF.cell, "changed")
    assert store.find(KEY, other_load) is None
    assert "another load under this name" in store.nearest(KEY, other_load)
    unknown = CellRef("quick", "in1-out1-c1", "w")
    assert "--update-baselines=create" in store.nearest(KEY, unknown)


def test_a_file_under_other_hardware_is_refused(root: Path) -> None:
    Night(root).store(1000.0, 0)
    store = BaselineStore(root, CATALOGUE)
    h200 = KEY.model_copy(update={"gpu": "NVIDIA H200"})
    store.path_of(h200).parent.mkdir(parents=True)
    store.path_of(h200).write_text(store.path_of(KEY).read_text())
    with pytest.raises(BaselineProblem, match="other hardware"):
        store.find(h200, REF)
    with pytest.raises(BaselineProblem, match="other hardware"):
        Night(root, key=h200).store(1000.0, 1, verdict=bare(Verdict.PASS))


def test_prune_removes_what_no_workload_defines(root: Path) -> None:
    kept, gone = Night(root), Night(root, ref=CellRef("fixed-shapes", "old", "w1"))
    foreign = Night(root, ref=CellRef("sweep", "old", "w2"))
    for night in (kept, gone, foreign):
        night.store(1000.0, 0)
    store = BaselineStore(root, CATALOGUE)
    outcome = kept.outcome(1000.0, 1)
    with pytest.raises(UsageProblem, match="prune"):
        store.update([outcome], Mode.PRUNE, "", START)
    changes = store.update([outcome], Mode.PRUNE, "", START, known_cells={REF.id})
    assert [(change.cell, change.action) for change in changes] == [("fixed-shapes/old", Action.PRUNED)]
    assert (kept.values, gone.values, foreign.values) == ([1000.0], [], [1000.0])


def test_concurrent_writers_lose_nothing(root: Path) -> None:
    nights = [Night(root, ref=CellRef("fixed-shapes", f"cell-{i}", "w")) for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda night: night.store(1000.0, 0), nights))
        list(pool.map(lambda night: night.store(1001.0, 1), nights))
    assert [night.values for night in nights] == [[1000.0, 1001.0]] * 12


def test_a_store_that_read_before_another_wrote_overwrites_nothing(root: Path) -> None:
    early = BaselineStore(root, CATALOGUE)
    assert early.find(KEY, REF) is None
    other = Night(root, ref=CellRef("fixed-shapes", "other", "w1"))
    other.store(500.0, 0)
    early.update([Night(root).outcome(1000.0, 1)], Mode.AUTO, "", START + timedelta(days=1))
    assert other.values == [500.0] and Night(root).values == [1000.0]


def test_a_crash_while_writing_leaves_the_old_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    night = Night(root)
    night.store(1000.0, 0)
    before = night.text

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        night.store(1010.0, 1)
    assert night.text == before
    files = sorted(path.name for path in root.rglob("*") if path.is_file())
    assert files == sorted(["pd-1p2d-tp2.json", LOCK_NAME])


def test_nothing_is_written_when_any_file_is_broken(root: Path) -> None:
    good, bad = Night(root), Night(root, key=KEY.model_copy(update={"topology": "aggregated-3x"}))
    good.store(1000.0, 0)
    bad.store(1000.0, 0)
    BaselineStore(root, CATALOGUE).path_of(bad.key).write_text("{")
    before = good.text
    outcomes = [good.outcome(1010.0, 1), bad.outcome(1010.0, 1, bare(Verdict.PASS))]
    with pytest.raises(BaselineProblem):
        BaselineStore(root, CATALOGUE).update(outcomes, Mode.AUTO, "", START + timedelta(days=1))
    assert good.text == before


def test_a_held_lock_is_waited_for_and_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    root.mkdir()
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.05)
    with FileLock(str(root / LOCK_NAME)):
        with pytest.raises(BaselineProblem, match="has held the lock"):
            Night(root).store(1000.0, 0, verdict=bare(Verdict.NO_BASELINE))


def test_files_are_readable_by_others_and_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.json"
    write_atomically(path, "one\n")
    write_atomically(path, "two\n")
    assert path.read_text() == "two\n" and path.stat().st_mode & 0o777 == 0o644
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]
