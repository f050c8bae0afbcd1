"""`pdperf` as people call it: tables, files, exit statuses, and errors with a way out."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import pytest_pdperf
from pytest_pdperf.cli import build_parser, main
from pytest_pdperf.commands.completion import bash, fish, options_of, zsh
from pytest_pdperf.commands.init import CI, plan_of
from pytest_pdperf.commands.shipped import COPIES, shipped
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.report.outcomes import save
from tests.unit.report.report_data import history_of, outcome, small_run

ROOT = Path(__file__).parents[3]
Said = Callable[[], tuple[str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """What was printed since the last look: (out, err)."""
    return lambda: tuple(capsys.readouterr())  # type: ignore[return-value]


def test_report_shows_one_run(tmp_path: Path, said: Said) -> None:
    assert main(["report", str(small_run(tmp_path / "r1"))]) == 0
    out, err = said()
    assert "in512-out256-c4" in out and "aggregated-3x" in out and "SIMULATED" in out
    assert err == ""


def test_report_says_where_goodput_peaks_each_on_one_line(tmp_path: Path, said: Said) -> None:
    for name in ("r1", "r2"):
        for clients in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            cell = outcome(f"in512-out256-c{clients}", goodput_rps=200.0 - abs(clients - 64))
            save(cell, tmp_path / name / "cells")
    assert main(["report", str(tmp_path / "r1")]) == 0
    peak = "512/256 pd-1p2d: goodput peaks at concurrency 64 (200.00 req/s); req/s by concurrency: 1: 137, "
    assert [line for line in said()[0].splitlines() if line.startswith(f"sweep: {peak}") and "256: 8" in line]
    assert main(["report", str(tmp_path / "r1"), str(tmp_path / "r2")]) == 0
    out = said()[0]
    assert f"sweep: r1: {peak}" in out and f"sweep: r2: {peak}" in out


def test_report_finds_the_newest_run_by_itself(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2
    assert "no run here" in said()[1]
    for name, cell in (("20250102-x", "in512-out256-c8"), ("20250101-x", "in512-out256-c1")):
        save(outcome(cell), tmp_path / "pdperf-results" / name / "cells")
    assert main(["report"]) == 0
    out, _ = said()
    assert "in512-out256-c8" in out and "in512-out256-c1 " not in out


def test_report_writes_every_format(tmp_path: Path, said: Said) -> None:
    run = small_run(tmp_path / "r1")
    files = {flag: tmp_path / "out" / f"x.{flag}" for flag in ("html", "md", "json")}
    words = [word for flag, path in files.items() for word in (f"--{flag}", str(path))]
    assert main(["report", str(run), "--quiet", *words]) == 0
    out, _ = said()
    assert out.splitlines() == [f"wrote {path}" for path in files.values()]
    assert (
        files["html"].read_text().startswith("\n<!doctype html>")
        or "<!doctype html>" in files["html"].read_text()
    )
    assert files["md"].read_text().startswith("# r1\n")
    assert json.loads(files["json"].read_text())["counts"]["NO_BASELINE"] == 6


def test_report_compares_runs_with_each_other_and_with_the_published_table(
    tmp_path: Path, said: Said
) -> None:
    first, second = small_run(tmp_path / "r1"), small_run(tmp_path / "r2")
    page = tmp_path / "x.html"
    assert main(["report", str(first), str(second), "--published", "--html", str(page)]) == 0
    out, _ = said()
    assert "pd-1p2d (r1)" in out and "pd-1p2d (r2)" in out and "pd-rdma" in out and "output, wall" in out
    assert "pd-1p2d (r2)" in page.read_text()


def test_report_fails_for_a_run_with_blocking_verdicts(tmp_path: Path) -> None:
    save(outcome(verdict="FAIL"), tmp_path / "bad" / "cells")
    assert main(["report", str(tmp_path / "bad"), "--quiet"]) == 1


def test_a_damaged_run_is_shown_with_warnings(tmp_path: Path, said: Said) -> None:
    run = small_run(tmp_path / "r1")
    (run / "cells" / "pd-1p2d--in512-out256-c4.json").write_text("{")
    assert main(["report", str(run)]) == 0
    out, err = said()
    assert "missing: cannot be read: the file is damaged or half-written" in out
    assert err.count("warning") == 1


def test_a_run_may_be_named_by_its_id(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    small_run(tmp_path / "pdperf-results" / "r1")
    small_run(tmp_path / "elsewhere" / "r2")
    monkeypatch.chdir(tmp_path)
    assert main(["report", "r1"]) == main(["report", "--results", "elsewhere", "r2"]) == 0
    assert main(["report", "r2"]) == 2
    assert main(["export", "r1", "--as", "vllm", "-o", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["report", "nowhere"], "no such run folder or published table"),
        (["report", "."], "not the folder of a run"),
        (["report", "--published", "h200"], "there is: h100-qwen3-32b"),
        (["report", "--published", "--json", "x.json"], "--json: describes one run, 0 are given"),
        (["history"], "no such history file or folder"),
        (["history", "--metric", "latency"], "history holds gated metrics only: ttft_ms_p50"),
        (["init", "nowhere"], "no such directory"),
        (["doctor", "--engine-env", "nowhere"], "no virtual environment there"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    words: list[str], complaint: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    _, err = said()
    assert complaint in err and err.startswith("pdperf: ") and len(err.splitlines()) == 1


def test_a_report_that_cannot_be_written_says_which(tmp_path: Path, said: Said) -> None:
    (tmp_path / "taken").write_text("")
    assert (
        main(
            [
                "report",
                str(small_run(tmp_path / "r")),
                "--quiet",
                "--html",
                str(tmp_path / "taken" / "x.html"),
            ]
        )
        == 2
    )
    assert "--html" in said()[1]


def test_history_lists_cells_with_their_change(tmp_path: Path, said: Said) -> None:
    history_of(tmp_path / "history" / "h100x6", [100, 101, 99, 120])
    (tmp_path / "history" / "broken.jsonl").write_text("{\n")
    assert main(["history", str(tmp_path / "history")]) == 0
    out, err = said()
    assert "fixed-shapes/in512-out256-c16" in out and "120.0 +20%" in out
    assert "broken.jsonl:1" in err


def test_history_shows_launches_and_a_plot(tmp_path: Path, said: Said) -> None:
    path = history_of(tmp_path, [100, 101, 99, 200])
    assert (
        main(["history", str(path), "--cell", "in512-*", "--metric", "ttft_ms_p50", "--plot", "--last", "2"])
        == 0
    )
    out, _ = said()
    assert "2025-03-04 02:00" in out and "2025-03-02" not in out.splitlines()[2]
    picture = [line for line in out.splitlines() if "┤" in line]
    assert sum(line.count("●") for line in picture) == 3 and sum(line.count("✕") for line in picture) == 1
    assert "✕" in picture[1] and "●" in picture[-2]
    assert "creep: 4 launches, 6 needed" in out


def test_history_finds_a_lasting_step(tmp_path: Path, said: Said) -> None:
    pytest.importorskip("ruptures")
    values = [100 + 0.1 * (i % 3) for i in range(8)] + [110 + 0.1 * (i % 3) for i in range(8)]
    path = history_of(tmp_path, values)
    assert main(["history", str(path), "--metric", "ttft_ms_p50"]) == 0
    out, _ = said()
    assert "creep: 10.0% worse between 0.8 (2025-03-08) and 0.9 (2025-03-09)" in out


def test_history_names_what_there_is(tmp_path: Path, said: Said) -> None:
    path = history_of(tmp_path, [100])
    assert main(["history", str(path), "--cell", "nothing"]) == 2
    assert "there is: pd-1p2d fixed-shapes/in512-out256-c16" in said()[1]


def test_init_puts_a_suite_that_pytest_collects(tmp_path: Path, said: Said) -> None:
    assert main(["init", str(tmp_path)]) == 0
    out, _ = said()
    assert "wrote        tests/perf/test_fixed_shapes.py" in out
    assert (tmp_path / "fixtures" / "topologies" / "pd-1p2d.yaml").is_file()
    assert all((tmp_path / place).is_file() for _, place in CI)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "pytest_pdperf.plugin", "-p", "no:cacheprovider", "-q"),
            *("tests/perf", "--collect-only", "-m", "pd", "--engine", "sim", "--rootdir", str(tmp_path)),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_fixed_shapes[pd-1p2d-in128-out64-c1]" in done.stdout


def test_init_never_changes_a_file(tmp_path: Path, said: Said) -> None:
    mine = tmp_path / "fixtures" / "tolerances.yaml"
    mine.parent.mkdir()
    mine.write_text("overrides: []  # mine\n")
    assert main(["init", str(tmp_path), "--no-ci"]) == 0
    out, _ = said()
    assert "kept yours   fixtures/tolerances.yaml" in out and "left alone" in out
    assert mine.read_text() == "overrides: []  # mine\n"
    assert not (tmp_path / ".github").exists()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["init", str(tmp_path), "--no-ci"]) == 0
    assert "wrote" not in said()[0]
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_init_dry_run_writes_nothing(tmp_path: Path, said: Said) -> None:
    assert main(["init", str(tmp_path), "--dry-run"]) == 0
    assert said()[0].count("would write") == len(list(plan_of(tmp_path, ci=True)))
    assert not list(tmp_path.iterdir())


def test_init_does_not_follow_a_dangling_link(tmp_path: Path, said: Said) -> None:
    (tmp_path / "fixtures").mkdir()
    (tmp_path / "fixtures" / "tolerances.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    assert main(["init", str(tmp_path), "--no-ci"]) == 0
    assert "kept yours   fixtures/tolerances.yaml" in said()[0]
    assert not (tmp_path / "elsewhere.yaml").exists()


def test_doctor_answers_for_this_machine(said: Said) -> None:
    status = main(["doctor", "--json"])
    out, _ = said()
    rows = {row["what"]: row for row in json.loads(out)}
    assert {"GPUs", "python", "shared memory", "open files", "ports", "kernel stamps", "leftovers"} <= set(
        rows
    )
    assert status == int(any(row["level"] == "fail" for row in rows.values()))
    assert main(["doctor"]) == status
    assert "kernel stamps" in said()[0]


def every_parser() -> dict[str, argparse.ArgumentParser]:
    parser = build_parser()
    (subs,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {"": parser, **subs.choices}


@pytest.mark.parametrize("command", list(every_parser()))
def test_every_help_has_examples_that_parse(command: str) -> None:
    parser = build_parser()
    epilog = every_parser()[command].epilog
    assert epilog is not None and epilog.startswith("examples:\n")
    examples = [line.strip() for line in epilog.splitlines() if line.strip().startswith("pdperf ")]
    assert examples or command == "completion"
    for example in examples:
        words = example.partition("  ")[0].replace("'", "").partition(" > ")[0].split()
        parser.parse_args(words[1:])


def test_the_parser_imports_nothing_heavy() -> None:
    code = (
        "import sys, pytest_pdperf.cli as cli; cli.build_parser();"
        "print([name for name in ('numpy', 'rich', 'jinja2', 'httpx') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_completion_knows_every_option(said: Said) -> None:
    options = options_of(build_parser())
    assert {"report", "history", "init", "doctor", "completion"} <= set(options)
    assert "--published" in options["report"]
    for script in (bash(options), zsh(options)):
        assert all(word in script for words in options.values() for word in words)
    assert "complete -c pdperf -n '__fish_seen_subcommand_from report' -l published" in fish(options)
    assert main(["completion", "bash"]) == 0
    assert "complete -o filenames -F _pdperf pdperf" in said()[0]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (["pdperf", "re"], ["report"]),
        (["pdperf", "report", "--h"], ["--help", "--html"]),
        (["pdperf", "completion", "z"], ["zsh"]),
    ],
)
def test_bash_completes(line: list[str], wanted: list[str], tmp_path: Path) -> None:
    script = bash(options_of(build_parser()))
    words = " ".join(f"'{word}'" for word in line)
    probe = f"{script}\nCOMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _pdperf; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "-c", probe], capture_output=True, text=True, timeout=30, check=True, cwd=tmp_path
    )
    assert done.stdout.split() == wanted


def test_the_wheel_holds_what_init_and_report_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {source: f"pytest_pdperf/{target}" for source, target in COPIES.items()} == included
    assert all((ROOT / source).is_dir() for source in COPIES)


def test_an_installed_package_finds_its_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "pytest_pdperf"
    package.mkdir(parents=True)
    monkeypatch.setattr(pytest_pdperf, "__file__", str(package / "__init__.py"))
    assert {source: shipped(source) for source in COPIES} == {s: package / t for s, t in COPIES.items()}
    with pytest.raises(UsageProblem, match="install it again"):
        list(plan_of(tmp_path, ci=True))
