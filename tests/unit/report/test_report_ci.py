"""What CI gets: a summary that its schema accepts, annotations that nothing can break out of, and never a failure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from pytest_pdperf.evidence.naming import Fault, Finding, Naming
from pytest_pdperf.gate.verdict import VERDICTS, Verdict
from pytest_pdperf.report import ci
from pytest_pdperf.report.ci import annotation_lines, step_summary, write_run_outputs
from pytest_pdperf.report.outcomes import CellOutcome, RunSummary, load, save
from pytest_pdperf.report.source import Hole, Run, load_run
from pytest_pdperf.report.summary_json import json_schema, summary_of
from tests.unit.report.report_data import judged_row, outcome, small_run

DOCS = Path(__file__).parents[3] / "docs" / "schema" / "summary-1.json"


def run(*outcomes: CellOutcome, **more: object) -> Run:
    return Run(name="r1", folder=Path("r1"), outcomes=outcomes, **more)  # type: ignore[arg-type]


def summary(folder: Path) -> RunSummary:
    outcomes, _ = load(folder / "cells")
    return RunSummary(run_id="r1", engine="sim", simulated=True, folder=folder, outcomes=tuple(outcomes))


def valid(data: object) -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(data, schema, cls=jsonschema.Draft202012Validator)


def test_the_schema_in_the_documentation_is_the_packaged_one() -> None:
    assert json.loads(DOCS.read_text()) == json_schema()


def test_the_schema_knows_every_verdict() -> None:
    schema = json_schema()
    assert schema["$defs"]["verdict"]["enum"] == [verdict.value for verdict in Verdict]
    assert set(schema["properties"]["counts"]["required"]) == {*(v.value for v in Verdict), "NOT_JUDGED"}


@pytest.mark.parametrize("verdict", [*Verdict, ""])
def test_every_verdict_makes_a_valid_summary(verdict: str) -> None:
    row = judged_row("ttft_ms_p50", Verdict.FAIL, 110.0, 100.0, 0.1)
    made = outcome(
        verdict=verdict, judged=(row,), ttft_ms_p50=110.0, tpot_ms_p50=None, output_tps=float("nan")
    )
    made = replace(made, naming=Naming(tuple(Finding(fault, "decode-0", "x") for fault in Fault), ("y",)))
    data = summary_of(run(made, holes=(Hole("pd", 1, "c", "gone"),), changes=("a: 1 -> 2",), problems=("p",)))
    valid(json.loads(json.dumps(data)))
    assert data["counts"][verdict or "NOT_JUDGED"] == 1 and sum(data["counts"].values()) == 1
    assert [one["fault"] for one in data["cells"][0]["naming"]["findings"]] == [*Fault]
    metrics = data["cells"][0]["metrics"]
    assert metrics["tpot_ms_p50"]["value"] is None and metrics["output_tps"]["value"] is None
    assert metrics["ttft_ms_p50"]["gate"]["limit"] == 0.1 and "gate" not in metrics["output_tps"]


def test_the_schema_is_no_formality() -> None:
    good = summary_of(run(outcome()))
    spoils: tuple[dict[str, object], ...] = (
        {"counts": {}},
        {"schema": 2},
        {"simulated": "no"},
        {"cells": [good["cells"][0] | {"verdict": "MAYBE"}]},
        {"cells": [{k: v for k, v in good["cells"][0].items() if k != "evidence"}]},
    )
    for spoil in spoils:
        with pytest.raises(jsonschema.ValidationError):
            valid(good | spoil)


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("verdict", list(Verdict))
def test_the_exit_status_follows_the_verdict_table(verdict: Verdict, required: bool) -> None:
    data = summary_of(run(outcome(verdict=verdict)), require_baseline=required)
    row = VERDICTS[verdict]
    red = row.blocks == "always" or (required and row.blocks == "with --require-baseline")
    assert data["exit"]["status"] == int(red) == data["exit"]["blocking_cells"]
    assert data["cells"][0]["blocks"] is red


def test_pytests_own_exit_status_wins() -> None:
    data = summary_of(run(outcome()), exit_status=2)
    assert data["exit"]["status"] == 2 and "interrupted" in data["exit"]["meaning"]


def test_a_run_leaves_three_files(tmp_path: Path) -> None:
    said: list[str] = []
    folder = small_run(tmp_path / "run")
    written = write_run_outputs(summary(folder), environ={}, emit=said.append)
    assert [path.name for path in written] == ["summary.json", "report.md", "report.html"]
    assert all(path.stat().st_size > 1000 for path in written) and said == []
    valid(json.loads((folder / "summary.json").read_text()))
    assert not list(folder.glob("*.part"))


def test_github_gets_a_summary_appended_and_annotations(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save(outcome(verdict="FAIL", rows=("FAIL ttft_ms_p50 | 2",)), folder / "cells")
    save(outcome("in512-out256-c4", verdict="PASS", order=1), folder / "cells")
    target = tmp_path / "step.md"
    target.write_text("before\n")
    said: list[str] = []
    env = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(target)}
    write_run_outputs(replace(summary(folder), simulated=False), environ=env, emit=said.append)
    text = target.read_text()
    assert text.startswith("before\n# PD performance\n") and "| 4 | pd-1p2d |" in text
    assert said == [
        "::error file=tests/perf/test_fixed_shapes.py,title=✕ FAIL pd-1p2d in512-out256-c1::FAIL ttft_ms_p50 | 2"
    ]


@pytest.mark.parametrize("broken", ["html", "markdown", "folder", "step"])
def test_nothing_here_fails_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    folder = small_run(tmp_path / "run")
    made = summary(folder)
    said: list[str] = []
    env: dict[str, str] = {}

    def explode(*_: object) -> Path:
        raise RuntimeError("first line\nsecond line")

    if broken in ("html", "markdown"):
        monkeypatch.setattr(ci, f"_{broken}", explode)
    elif broken == "folder":
        (folder / "summary.json").mkdir()
        (folder / "report.md").mkdir()
        (folder / "report.html").mkdir()
    else:
        env["GITHUB_STEP_SUMMARY"] = str(tmp_path / "no" / "such" / "folder.md")
    written = write_run_outputs(made, environ=env, emit=said.append)
    assert len(said) == 1 and said[0].startswith("pdperf: warning: ") and "\n" not in said[0]
    assert len(written) == {"html": 2, "markdown": 2, "folder": 0, "step": 3}[broken]


def test_no_text_can_start_a_command_of_its_own() -> None:
    bad = outcome("c\n::set-output name=x::1", verdict="FAIL", rows=("50%\r\n::error::x", "y"))
    bad = replace(bad, nodeid="a,b:c\n::warning::z::test")
    (line,) = annotation_lines(run(bad))
    assert "\n" not in line and "\r" not in line
    assert line.startswith("::error file=a%2Cb%3Ac%0A,title=")
    assert line.endswith("::50%25%0D%0A::error::x%0Ay")


def test_annotations_follow_the_verdict_table() -> None:
    found = [
        annotation_lines(run(outcome(verdict=verdict))) for verdict in ("PASS", "IMPROVED", "NO_BASELINE", "")
    ]
    assert found == [[], [], [], []]
    assert annotation_lines(run(outcome(verdict="NOISY")))[0].startswith("::warning ")
    assert annotation_lines(run(outcome(verdict="NO_BASELINE")), require_baseline=True)[0].startswith(
        "::error "
    )


def test_what_an_update_accepted_is_no_error_in_ci() -> None:
    suspect = outcome(verdict="SUSPECT")
    accepted = run(replace(suspect, details=suspect.details_when(True)))
    assert annotation_lines(accepted, require_baseline=True) == []
    assert summary_of(accepted)["exit"]["blocking_cells"] == 0
    assert summary_of(run(suspect))["exit"]["blocking_cells"] == 1


def test_more_annotations_than_github_shows_end_in_a_count() -> None:
    many = [outcome(f"in512-out256-c{c}", verdict="FAIL") for c in range(1, 31)]
    lines = annotation_lines(run(*many))
    assert len(lines) == 10 and "21 more cells" in lines[-1]


def test_a_step_summary_is_cut_before_github_drops_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = load_run(small_run(tmp_path))
    whole = step_summary(made)
    monkeypatch.setattr(ci, "STEP_SUMMARY_LIMIT", 600)
    cut = step_summary(made)
    assert len(cut.encode()) < 700 < len(whole.encode())
    assert cut.endswith("Cut here: the whole is in report.md of the run's folder.\n")
