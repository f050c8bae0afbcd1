"""Our runs in other tools' files, read back by those tools or by our own readers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pytest_pdperf.cli import main
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.measure.records import Status
from pytest_pdperf.report.exchange.chosen import choose
from pytest_pdperf.report.exchange.definitions import definition_tables
from pytest_pdperf.report.exchange.detect import import_file
from pytest_pdperf.report.exchange.to_pytest_benchmark import statistics
from pytest_pdperf.report.source import load_run
from tests.unit.report.report_data import cell_of, request, small_run, write_cell

PUBLISHED = Path(__file__).parents[3] / "baselines" / "published" / "h100-qwen3-32b.json"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return small_run(tmp_path / "run")


def test_vllm_export_comes_back_as_what_was_measured(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "all.json"
    assert main(["export", str(run), "--as", "vllm", "--detailed", "-o", str(out)]) == 0
    results = import_file(out)
    outcomes = load_run(run).outcomes
    assert len(results) == len(outcomes) == 6
    for found, ours in zip(results, outcomes, strict=True):
        assert found.shape == "512/8" and found.tool == "vllm"
        assert f"c{found.concurrency}" == ours.result.cell.rpartition("-")[2]
        assert (found.requests, found.ok, found.failed) == (8, 8, 0)
        same = [name for name in found.metrics if name in ours.result.metrics]
        assert {
            "ttft_ms_p50",
            "ttft_ms_p99",
            "tpot_ms_p50",
            "itl_ms_p99",
            "e2e_ms_p50",
            "output_tps_wall",
        } <= set(same)
        for name in same:
            assert found.metrics[name].value == pytest.approx(ours.result.metrics[name].value), name


def test_vllm_export_counts_failures_and_keeps_them_out_of_latencies(tmp_path: Path) -> None:
    requests = [
        request(0),
        request(1, ttft_ms=70.0),
        request(2, ttft_ms=900.0, status=Status.SHORT, error="short"),
    ]
    write_cell(tmp_path, "pd-1p2d", cell_of(requests=3), requests)
    out = tmp_path / "one.json"
    assert main(["export", str(tmp_path), "--as", "vllm", "--detailed", "-o", str(out)]) == 0
    data = json.loads(out.read_text())
    assert (data["num_prompts"], data["completed"], data["failed"]) == (3, 2, 1)
    assert data["median_ttft_ms"] == pytest.approx(60.0)
    assert data["std_ttft_ms"] == pytest.approx(10.0)
    assert data["total_output_tokens"] == 16
    assert data["errors"] == ["", "", "short"] and data["ttfts"] == pytest.approx([0.05, 0.07, 0.0])


def test_without_records_the_summary_is_exported_and_the_rest_is_null(run: Path, tmp_path: Path) -> None:
    records = run / "records" / "pd-1p2d" / "in512-out256-c4" / "records.json"
    records.unlink()
    arguments = ["export", str(run), "--as", "vllm", "--topology", "pd-*", "--cell", "*-c4"]
    out = tmp_path / "one.json"
    assert main([*arguments, "-o", str(out)]) == 0
    data = json.loads(out.read_text())
    ours = next(o for o in load_run(run).outcomes if o.topology == "pd-1p2d" and o.result.cell.endswith("c4"))
    assert data["median_ttft_ms"] == ours.result.metrics["ttft_ms_p50"].value
    assert data["std_ttft_ms"] is None
    assert main([*arguments, "--detailed"]) == 2
    assert main(["export", str(run), "--as", "pytest-benchmark", "-o", str(out)]) == 1
    assert len({b["param"] for b in json.loads(out.read_text())["benchmarks"]}) == 5
    assert main([*arguments[:3], "pytest-benchmark", *arguments[4:]]) == 2


def test_an_invalid_cell_says_so_in_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = write_cell(tmp_path, "pd-1p2d", cell_of(requests=1), [request(0)])
    from pytest_pdperf.report.outcomes import save

    save(replace(made, result=replace(made.result, invalid=("a role restarted",))), tmp_path / "cells")
    assert main(["export", str(tmp_path), "--as", "vllm"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["pdperf_invalid"] == ["a role restarted"]
    assert "INVALID (a role restarted)" in said.err


def test_pytest_benchmark_compares_two_exported_runs(run: Path, tmp_path: Path) -> None:
    files = []
    for number in (1, 2):
        files.append(str(tmp_path / f"000{number}_run.json"))
        assert main(["export", str(run), "--as", "pytest-benchmark", "--cell", "*-c4", "-o", files[-1]]) == 0
    command = [
        sys.executable,
        "-m",
        "pytest_benchmark",
        "compare",
        *files,
        "--csv",
        str(tmp_path / "table.csv"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Failed to load" not in done.stdout + done.stderr
    assert "benchmark 'ttft in512-out256-c4': 4 tests" in done.stdout
    ours = next(o for o in load_run(run).outcomes if o.topology == "pd-1p2d" and o.result.cell.endswith("c4"))
    lines = (tmp_path / "table.csv").read_text().splitlines()
    header = lines[0].split(",")
    row = next(line.split(",") for line in lines if "ttft[pd-1p2d" in line)
    median = ours.result.metrics["ttft_ms_p50"].value
    assert median is not None
    assert float(row[header.index("median")]) == pytest.approx(median / 1e3)


def test_statistics_are_those_of_the_sample() -> None:
    found = statistics(np.asarray([1.0, 2.0, 3.0, 4.0, 100.0]))
    assert (found["min"], found["max"], found["median"], found["rounds"]) == (1.0, 100.0, 3.0, 5)
    assert found["stddev"] == pytest.approx(43.6177, abs=1e-3)
    assert (found["q1"], found["q3"], found["iqr"]) == (2.0, 4.0, 2.0)
    assert found["outliers"] == "1;1"
    assert (found["ld15iqr"], found["hd15iqr"]) == (1.0, 4.0)
    assert found["ops"] == pytest.approx(1 / 22)


def test_choosing_nothing_lists_what_there_is(run: Path) -> None:
    with pytest.raises(UsageProblem, match="pd-1p2d/in512-out256-c8"):
        choose(load_run(run), cell="in1-*")
    assert main(["export", str(PUBLISHED), "--as", "vllm"]) == 2
    assert main(["export", str(run), "--as", "raw"]) == 2
    assert main(["export", str(run), "--as", "raw", "--detailed", "-o", "x"]) == 2


def test_definitions_of_other_tools_from_the_same_stamps(tmp_path: Path) -> None:
    late = replace(request(0), end_ns=(request(0).end_ns or 0) + 80_000_000)
    write_cell(tmp_path, "pd-1p2d", cell_of(requests=1), [late])
    (chosen,) = choose(load_run(tmp_path))
    (table,) = definition_tables(chosen, "guidellm")
    by_name = {row.name: row for row in table.rows}
    same = by_name["median_inter_token_latency_ms"]
    assert (same.ours, same.value, same.our_value) == ("tpot_ms_p50", 10.0, 10.0) and same.change == 0.0
    other = by_name["median_time_per_output_token_ms"]
    assert other.value == pytest.approx(120.0 / 8) and other.ours == "" and other.change is None
    assert by_name["median_request_latency_ms"].value == pytest.approx(200.0)
    (table,) = definition_tables(chosen, "aiperf")
    assert {row.ours for row in table.rows} >= {
        "tpot_ms_p50",
        "itl_ms_p99",
        "output_tps_wall",
        "request_rate",
    }


def test_report_with_definitions(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--definitions", "vllm"]) == 0
    said = capsys.readouterr().out
    assert "median_tpot_ms" in said and "tpot_ms_p50" in said
    (run / "records" / "pd-1p2d" / "in512-out256-c4" / "records.json").unlink()
    assert main(["report", str(run), "--definitions", "vllm"]) == 1
    assert "not in the run's folder" in capsys.readouterr().err
    assert main(["report", str(run), "--definitions", "vlm"]) == 2
    assert "did you mean 'vllm'" in capsys.readouterr().err
    assert main(["report", str(run), str(run), "--definitions", "vllm"]) == 2
    assert main(["report", str(run), "--definitions", "vllm", "--md", "x.md"]) == 2


def strings(data: object) -> bool:
    """What a Map(String, String) of the database takes."""
    return isinstance(data, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in data.items())


def test_pytorch_hud_records_have_the_types_of_its_table(run: Path, tmp_path: Path) -> None:
    """Columns and types of benchmark.oss_ci_benchmark_v3, in pytorch/test-infra's clickhouse_db_schema."""
    out = tmp_path / "hud.json"
    assert main(["export", str(run), "--as", "pytorch-hud", "-o", str(out)]) == 0
    records = json.loads(out.read_text())
    outcomes = load_run(run).outcomes
    for record in records:
        assert record.keys() == {"benchmark", "model", "dependencies", "metric"}
        assert record["benchmark"].keys() == {"name", "mode", "dtype", "extra_info"}
        assert record["model"].keys() == {"name", "type", "backend", "extra_info"}
        assert record["metric"].keys() == {"name", "benchmark_values", "extra_info"}
        for part in ("benchmark", "model", "metric"):
            assert strings(record[part]["extra_info"])
            assert strings(
                {k: v for k, v in record[part].items() if k not in ("extra_info", "benchmark_values")}
            )
        assert all(strings(dependency) for dependency in record["dependencies"].values())
        assert all(isinstance(value, float) for value in record["metric"]["benchmark_values"])
    found = {
        (
            r["benchmark"]["extra_info"]["topology"],
            r["benchmark"]["extra_info"]["cell"],
            r["metric"]["name"],
        ): r
        for r in records
    }
    for outcome in outcomes:
        for name in ("ttft_ms_p50", "tpot_ms_p50", "output_tps_wall"):
            record = found[outcome.topology, outcome.result.cell, name]
            assert record["metric"]["benchmark_values"] == [outcome.result.metrics[name].value]
    one = found["pd-1p2d", outcomes[0].result.cell, "ttft_ms_p50"]["metric"]["extra_info"]
    assert (one["unit"], one["n"]) == ("ms", "8")


def test_launches_are_repeats_and_invalid_cells_are_no_records_of_the_hud(tmp_path: Path) -> None:
    for launch in (1, 2):
        write_cell(tmp_path, "pd-1p2d", cell_of(requests=2), [request(0), request(1)], launch=launch)
    write_cell(tmp_path, "agg", cell_of(requests=2), [request(0), request(1, status=Status.SHORT, error="s")])
    out = tmp_path / "hud.json"
    assert main(["export", str(tmp_path), "--as", "pytorch-hud", "-o", str(out)]) == 1
    records = json.loads(out.read_text())
    assert {r["benchmark"]["extra_info"]["topology"] for r in records} == {"pd-1p2d"}
    assert all(len(r["metric"]["benchmark_values"]) == 2 for r in records)


def test_llm_d_reports_pass_that_projects_own_validation(run: Path, tmp_path: Path) -> None:
    llmd = pytest.importorskip("llmd_benchmark_report")
    out = tmp_path / "reports.jsonl"
    assert main(["export", str(run), "--as", "llm-d", "-o", str(out)]) == 0
    reports = [json.loads(line) for line in out.read_text().splitlines()]
    outcomes = load_run(run).outcomes
    assert len(reports) == len(outcomes)
    for data, ours in zip(reports, outcomes, strict=True):
        report = llmd.load_benchmark_report(data)
        aggregate = report.results.request_performance.aggregate
        assert (aggregate.requests.total, aggregate.requests.failures) == (8, 0)
        ttft = aggregate.latency.time_to_first_token
        assert str(ttft.units) == "ms"
        assert ttft.p50 == pytest.approx(ours.result.metrics["ttft_ms_p50"].value)
        assert aggregate.latency.inter_token_latency.p99 == pytest.approx(
            ours.result.metrics["itl_ms_p99"].value
        )
        assert aggregate.throughput.output_token_rate.mean == ours.result.metrics["output_tps_wall"].value


def test_llm_d_report_without_records_has_only_what_the_summary_knows(run: Path, tmp_path: Path) -> None:
    (run / "records" / "pd-1p2d" / "in512-out256-c4" / "records.json").unlink()
    out = tmp_path / "report.json"
    chosen = ["--topology", "pd-*", "--cell", "*-c4"]
    assert main(["export", str(run), "--as", "llm-d", *chosen, "-o", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["scenario"]["load"]["standardized"]["input_seq_len"] == {
        "distribution": "fixed",
        "value": 512,
    }
    latency = report["results"]["request_performance"]["aggregate"]["latency"]
    assert "time" not in report["run"]
    assert all("mean" in statistic and "stddev" not in statistic for statistic in latency.values())
    llmd = pytest.importorskip("llmd_benchmark_report")
    llmd.load_benchmark_report(report)


def test_an_invalid_cell_says_so_in_its_llm_d_report(tmp_path: Path) -> None:
    write_cell(tmp_path, "agg", cell_of(requests=2), [request(0), request(1, status=Status.SHORT, error="s")])
    out = tmp_path / "report.json"
    assert main(["export", str(tmp_path), "--as", "llm-d", "-o", str(out)]) == 0
    report = json.loads(out.read_text())
    assert "INVALID" in report["run"]["description"]
    assert report["results"]["request_performance"]["aggregate"]["requests"]["failures"] == 1
