"""Run folders as a bad night leaves them, through `pdperf report` in every format: said in place, the rest is shown."""

from __future__ import annotations

import html
import re
from pathlib import Path

import orjson
import pytest

from pytest_pdperf.cli import main
from tests.unit.report.report_data import cell_of, closed_loop, small_run, write_cell

PLACES = {"half": "in512-out256-c4", "newer": "in512-out256-c8", "broke off": "in512-out256-c16"}
REASONS = {
    "half": "the file is damaged or half-written",
    "newer": "newer version (schema 7, this one reads 1): update pytest-pdperf",
    "broke off": "the run broke off while this cell was measured",
}
TAG = re.compile(r"<[^>]*?title=\"([^\"]*)\"[^>]*>|<[^>]+>")
"""A tag, and what it says when it is pointed at."""


@pytest.fixture
def night(tmp_path: Path) -> Path:
    """Two whole topologies of which one lost three cells, and one cell that is INVALID and looks the fastest."""
    run = small_run(tmp_path / "night")
    path = run / "cells" / f"pd-1p2d--{PLACES['half']}.json"
    path.write_bytes(path.read_bytes()[:300])
    path = run / "cells" / f"pd-1p2d--{PLACES['newer']}.json"
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | {"schema": 7, "novelty": [1]}))
    (run / "records" / "pd-1p2d" / PLACES["broke off"]).mkdir()
    for topology, ttft, more in (
        ("pd-1p2d", 1.0, {"verdict": "INVALID", "rows": ("INVALID: 3 of 8 answers are wrong",)}),
        ("aggregated-3x", 50.0, {"verdict": "PASS"}),
    ):
        write_cell(run, topology, cell_of(concurrency=2), closed_loop(2, [ttft] * 8), **more)
    stamps = run / "records" / "aggregated-3x" / "in512-out256-c1" / "stamps.bin"
    stamps.write_bytes(stamps.read_bytes()[:37])
    (run / "environment" / "pd-1p2d.json").write_text('{"host": "x')
    return run


def lines_of(form: str, run: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """One line a table row, without markup. An INVALID cell blocks: the exit status is 1."""
    out = run.parent / f"out.{form}"
    arguments = ["--quiet", f"--{form}", str(out)] if form != "terminal" else []
    capsys.readouterr()
    assert main(["report", str(run), *arguments]) == 1
    printed = capsys.readouterr()
    assert "environment/pd-1p2d.json: cannot be read" in printed.err
    if form == "html":
        rows = re.findall(r"<tr.*?</tr>", out.read_text(), re.S)
        return [html.unescape(" ".join(TAG.sub(r" \1 ", row).split())) for row in rows]
    text = printed.out if form == "terminal" else out.read_text()
    return text.replace("\\", "").splitlines()


@pytest.fixture(params=["terminal", "md", "html"])
def shown(
    request: pytest.FixtureRequest,
    night: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[str, list[str]]:
    """The format and what it shows, one line a table row."""
    monkeypatch.setenv("COLUMNS", "250")
    return request.param, lines_of(request.param, night, capsys)


def test_what_is_lost_is_said_in_its_place(shown: tuple[str, list[str]]) -> None:
    _, lines = shown
    for what, reason in REASONS.items():
        assert any("pd-1p2d" in line and reason in line for line in lines), what


def test_the_rest_of_a_bad_night_is_shown(shown: tuple[str, list[str]]) -> None:
    _, lines = shown
    whole = [line for line in lines if "aggregated-3x" in line and "8/8" in line]
    assert len(whole) >= 4, "the other topology has all of its cells"
    assert any("pd-1p2d" in line and "NO_BASELINE" in line for line in lines), (
        "and one of the damaged one is whole"
    )


def test_an_invalid_cell_is_called_so_and_never_the_better_one(shown: tuple[str, list[str]]) -> None:
    form, lines = shown
    invalid = [line for line in lines if "INVALID" in line and "pd-1p2d" in line]
    assert invalid
    assert not any("*" in line for line in invalid), "an invalid number is no better value"
    if form == "html":
        assert any("no performance is read from this cell" in line for line in invalid)
