"""What lies in a run folder is shown; what is broken, newer or missing is said in its place."""

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.report.outcomes import ACCEPTED, CellOutcome, RunSummary, load, save, settled
from pytest_pdperf.report.source import load_run, open_source, run_of
from tests.unit.report.report_data import cell_of, outcome, request, small_run, write_cell, write_environment

PUBLISHED = Path(__file__).parents[3] / "baselines" / "published" / "h100-qwen3-32b.json"


def test_a_whole_run_has_no_holes(tmp_path: Path) -> None:
    run = open_source(small_run(tmp_path / "20250101-000000-abcd"))
    assert run.name == "20250101-000000-abcd"
    assert len(run.outcomes) == 6
    assert run.holes == () and run.problems == ()
    assert run.simulated
    assert set(run.environments) == {"pd-1p2d", "aggregated-3x"}


def test_a_damaged_cell_becomes_a_hole_at_its_place(tmp_path: Path) -> None:
    small_run(tmp_path)
    path = tmp_path / "cells" / "pd-1p2d--in512-out256-c4.json"
    path.write_bytes(path.read_bytes()[:200])
    run = load_run(tmp_path)
    assert len(run.outcomes) == 5
    (hole,) = run.holes
    assert (hole.topology, hole.launch, hole.cell) == ("pd-1p2d", 1, "in512-out256-c4")
    assert "damaged or half-written" in hole.reason
    assert run.problems == (f"cells/{path.name}: {hole.reason}",)


@pytest.mark.parametrize("place", ["outcome", "result"])
def test_a_newer_schema_is_named_as_such(tmp_path: Path, place: str) -> None:
    save(outcome(), tmp_path / "cells")
    (path,) = (tmp_path / "cells").glob("*.json")
    data = orjson.loads(path.read_bytes())
    (data if place == "outcome" else data["result"])["schema"] = 7
    path.write_bytes(orjson.dumps(data))
    (hole,) = load_run(tmp_path).holes
    assert "newer version (schema 7" in hole.reason


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b"{}", b'{"schema": 1}', b'{"schema": "x"}', b"\xff\xfe"]
)
def test_nothing_in_a_cell_file_raises(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "pd--c.launch3.json").write_bytes(content)
    run = load_run(tmp_path)
    assert run.outcomes == ()
    assert [(h.topology, h.launch, h.cell) for h in run.holes] == [("pd", 3, "c")]


def test_a_cell_that_broke_off_is_a_hole(tmp_path: Path) -> None:
    small_run(tmp_path)
    (tmp_path / "records" / "pd-1p2d-launch2" / "in512-out256-c16").mkdir(parents=True)
    (hole,) = load_run(tmp_path).holes
    assert (hole.topology, hole.launch, hole.cell) == ("pd-1p2d", 2, "in512-out256-c16")
    assert "broke off" in hole.reason


def test_an_unreadable_environment_is_a_warning(tmp_path: Path) -> None:
    small_run(tmp_path)
    (tmp_path / "environment" / "pd-1p2d.json").write_text('{"host": "x')
    run = load_run(tmp_path)
    assert set(run.environments) == {"aggregated-3x"}
    assert run.problems == ("environment/pd-1p2d.json: cannot be read: the file is damaged or half-written",)


def test_a_real_engine_is_not_called_simulated(tmp_path: Path) -> None:
    save(outcome(engine="vllm"), tmp_path / "cells")
    write_environment(tmp_path, "pd-1p2d", versions={"engine": "0.26.0"})
    assert not load_run(tmp_path).simulated


def test_simulated_is_known_from_the_environment_alone(tmp_path: Path) -> None:
    write_environment(tmp_path, "pd-1p2d")
    assert load_run(tmp_path).simulated


def test_a_summary_adds_what_only_the_session_knows(tmp_path: Path) -> None:
    small_run(tmp_path)
    outcomes, _ = load(tmp_path / "cells")
    summary = RunSummary(
        run_id="r1",
        engine="sim",
        simulated=True,
        folder=tmp_path,
        outcomes=tuple(outcomes),
        launches=("up in 6 s",),
        changes=("x: 1 -> 2",),
        problems=("odd",),
    )
    run = run_of(summary)
    assert (run.name, run.launches, run.changes, run.problems) == (
        "r1",
        ("up in 6 s",),
        ("x: 1 -> 2",),
        ("odd",),
    )


def test_a_resumed_run_keeps_what_failed_and_measures_again_what_says_nothing(tmp_path: Path) -> None:
    words = ("PASS", "FAIL", "NO_BASELINE", "NOISY", "INVALID", "INCONCLUSIVE", "SUSPECT", "")
    for order, verdict in enumerate(words):
        save(outcome(f"c{order}", verdict=verdict, order=order), tmp_path)
    kept = settled(load(tmp_path)[0])
    assert [one.verdict for one in kept] == ["PASS", "FAIL", "NO_BASELINE", "NOISY"]
    assert [one.red(require_baseline=False) for one in kept] == [False, True, False, False]
    assert [one.red(require_baseline=True) for one in kept] == [False, True, True, False]
    suspect = outcome(verdict="SUSPECT")
    assert suspect.open and not replace(suspect, details=suspect.details_when(True)).open
    accepted = replace(kept[1], details=kept[1].details_when(True))
    assert accepted.details[ACCEPTED] and ACCEPTED not in accepted.details_when(False)
    assert not accepted.red(require_baseline=True)
    assert not outcome(verdict="").red(require_baseline=True)


def test_outcomes_of_older_versions_stay_readable() -> None:
    data = outcome().to_json()
    del data["judged"], data["ttft_split"]
    assert CellOutcome.from_json(data) == outcome()


def test_records_of_a_cell_are_found_by_launch(tmp_path: Path) -> None:
    write_cell(tmp_path, "pd-1p2d", cell_of(), [request(0)])
    run = load_run(tmp_path)
    folder = run.samples_folder(run.outcomes[0])
    assert folder is not None and (folder / "stamps.bin").exists()


def test_the_published_table_is_whole() -> None:
    run = open_source(PUBLISHED)
    assert run.published and not run.simulated
    assert len(run.outcomes) == 48
    by_place = {(o.topology, o.result.cell): o.result for o in run.outcomes}
    worst = by_place[("pd-tcp", "in8192-out128-c16")]
    assert worst.metrics["ttft_ms_p50"].value == 17514.203
    assert worst.metrics["ttft_ms_p50"].n == 64
    assert worst.metrics["itl_ms_p99"].n == 0, "the number of gaps was not published"
    assert (
        by_place[("aggregated", "in256-out1024-c16")]
        .metrics["output_tps_wall"]
        .note.startswith("one request")
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema"),
        ({"cells": []}, "cells"),
        ({"extra": 1}, "extra"),
    ],
)
def test_a_bad_published_table_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(orjson.dumps(orjson.loads(PUBLISHED.read_bytes()) | change))
    with pytest.raises(UsageProblem, match=words):
        open_source(path)


def test_a_published_metric_must_be_ours(tmp_path: Path) -> None:
    data = orjson.loads(PUBLISHED.read_bytes())
    data["cells"][0]["metrics"] = {"latency": 3.0}
    path = tmp_path / "t.json"
    path.write_bytes(orjson.dumps(data))
    with pytest.raises(UsageProblem, match="no metric is called 'latency'"):
        open_source(path)


@pytest.mark.parametrize("make", ["missing", "empty"])
def test_what_is_no_run_is_refused(tmp_path: Path, make: str) -> None:
    path = tmp_path / make
    if make == "empty":
        path.mkdir()
    with pytest.raises(UsageProblem, match=make):
        open_source(path)


def test_fresh_launches_of_suspects_are_no_missing_cells(tmp_path: Path) -> None:
    small_run(tmp_path)
    for launch in ("pd-1p2d-launch1001", "pd-1p2d-launch1002-reference", "pd-1p2d-launch3"):
        (tmp_path / "records" / launch / "in512-out256-c4").mkdir(parents=True)
    assert [(hole.topology, hole.launch) for hole in load_run(tmp_path).holes] == [("pd-1p2d", 3)]
