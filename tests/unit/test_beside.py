"""Another tool on our stack: told the same load, read by definition, held to 3 % only where it can be."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_pdperf.beside import HELD, TOOLS, Load, agreement, find, load_of, run, shown
from pytest_pdperf.engines.base import Programs
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.measure.cell_result import CellResult, MetricValue
from pytest_pdperf.measure.table import METRICS
from pytest_pdperf.report.exchange.detect import import_file
from pytest_pdperf.report.outcomes import CellOutcome
from pytest_pdperf.spec.workload import Cell, ClosedLoop, OpenLoop, Stream

DATA = Path(__file__).parents[1] / "data" / "exchange" / "vllm_2026_detailed.json"


def cell(**changes: object) -> Cell:
    stream = Stream(
        name="main",
        input_tokens=(512, 512),
        output_tokens=256,
        arrival=ClosedLoop(concurrency=4),
        requests=32,
    ).model_copy(update=changes)
    return Cell(id="in512-out256-c4", workload="w", streams=(stream,), warmups=2)


def load(folder: Path) -> Load:
    return load_of(cell(), url="http://h:1", served_model="m", tokenizer="t", seed=7, folder=folder)


def program(folder: Path, script: str) -> Path:
    path = folder / "bin" / "vllm"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(stat.S_IRWXU)
    return path


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_every_tool_is_told_the_whole_load(tool: object, tmp_path: Path) -> None:
    words = tool.arguments(load(tmp_path))  # type: ignore[attr-defined]
    for flag, value in {
        "--base-url": "http://h:1",
        "--model": "m",
        "--tokenizer": "t",
        "--random-input-len": "512",
        "--random-output-len": "256",
        "--num-prompts": "32",
        "--max-concurrency": "4",
        "--seed": "7",
    }.items():
        assert words[words.index(flag) + 1] == value


@pytest.mark.parametrize(
    "changes",
    [
        {"input_tokens": (512, 1024)},
        {"arrival": OpenLoop(rate_rps=2.0)},
        {"arrival": ClosedLoop(concurrency=4, think_s=0.5)},
    ],
)
def test_a_load_that_others_cannot_send_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="only compared on"):
        load_of(cell(**changes), url="u", served_model="m", tokenizer="t", seed=0, folder=tmp_path)


def test_what_the_tool_wrote_is_read(tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = program(tmp_path, f"cp {DATA} {out}/vllm.json")
    assert run(TOOLS["vllm"], path, load(out), timeout_s=30).tool == "vllm"


def test_a_tool_that_fails_is_quoted(tmp_path: Path) -> None:
    path = program(tmp_path, "echo no such tokenizer; exit 3")
    with pytest.raises(UsageProblem, match=r"(?s)vllm bench serve ended with 3.*no such tokenizer"):
        run(TOOLS["vllm"], path, load(tmp_path / "out"), timeout_s=30)
    with pytest.raises(UsageProblem, match="took longer than"):
        run(TOOLS["vllm"], program(tmp_path, "exec sleep 30"), load(tmp_path / "out"), timeout_s=0.2)


def test_a_tool_that_is_missing_or_unknown_is_said(tmp_path: Path) -> None:
    assert find("vllm", Programs((tmp_path,))) == "vllm is not installed; name its --engine-env"
    assert find("toy", Programs((tmp_path,))) == "no benchmark program is known for engine toy"
    path = program(tmp_path, "")
    assert find("sim", Programs((path.parent,))) == (TOOLS["vllm"], path)


def ours(factor: float) -> CellOutcome:
    (theirs,) = import_file(DATA)
    metrics = {
        name: MetricValue(metric.value / factor, 32)
        for name, metric in theirs.metrics.items()
        if name in METRICS and metric.value is not None
    }
    result = CellResult("t", "w", "in512-out256-c4", metrics, requests=32, ok=32)
    return CellOutcome(nodeid="n", topology="t", kind="pd", engine="vllm", order=0, launch=1, result=result)


@pytest.mark.parametrize(
    ("factor", "agree"), [(1.0, True), (1.029, True), (0.971, True), (1.031, False), (0.969, False)]
)
def test_three_percent_either_way(factor: float, agree: bool) -> None:
    (theirs,) = import_file(DATA)
    lines, apart = agreement(theirs, ours(factor))
    assert len(lines) >= len(HELD & theirs.metrics.keys()) >= 4
    assert (apart == []) == agree
    assert agree or len(apart) == len(HELD & theirs.metrics.keys())


@pytest.mark.parametrize(
    ("before", "after", "agree"),
    [(1.10, 0.95, True), (1.10, 1.02, True), (1.10, 1.031, False), (0.9, 0.969, False), (0.9, 0.98, True)],
)
def test_what_lies_between_two_measurements_of_ours_is_no_disagreement(
    before: float, after: float, agree: bool
) -> None:
    (theirs,) = import_file(DATA)
    lines, apart = agreement(theirs, ours(before), ours(after))
    assert (apart == []) == agree
    assert all(f"({before - 1:+.1%} and {after - 1:+.1%})" in line for line in lines)


def test_a_late_ttft_is_shown_and_not_held_against_us() -> None:
    (theirs,) = import_file(DATA)
    late = replace(theirs, metrics={k: v for k, v in theirs.metrics.items() if k.startswith("ttft")})
    lines, apart = agreement(late, ours(1.5))
    assert lines and "by vllm" in lines[0] and "(+50.0%)" in lines[0]
    assert apart == []


def test_comparisons_are_shown_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two\n")
    (tmp_path / "a.txt").write_text("one\n  x\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "vllm.json").write_text(json.dumps({}))
    assert shown(tmp_path) == ["one", "  x", "two"]
