"""Foreign result files: what is read, what stays unknown, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_pdperf.cli import main
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.report.exchange.beside import matching, rows
from pytest_pdperf.report.exchange.detect import import_file
from pytest_pdperf.report.exchange.imported import ImportedResult
from tests.unit.report.report_data import outcome, small_run

DATA = Path(__file__).parents[2] / "data" / "exchange"
SHARED = Path(__file__).parents[3].parent / "shared"
Saved = Callable[..., Path]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A file of the collection with changed keys; None removes a key."""

    def save(name: str, **changes: Any) -> Path:
        data = json.loads(
            (DATA / name).read_text().splitlines()[0] if name.endswith("l") else (DATA / name).read_text()
        )
        data |= changes
        for key in [key for key, value in changes.items() if value is ...]:
            del data[key]
        path = tmp_path / "some-name.txt"
        path.write_text(json.dumps(data))
        return path

    return save


def one(path: Path) -> ImportedResult:
    (result,) = import_file(path)
    return result


def value(result: ImportedResult, metric: str) -> float | None:
    return result.metrics[metric].value


def test_old_vllm_result() -> None:
    found = one(DATA / "vllm_2025.json")
    assert (found.tool, found.layout) == ("vllm", "2025 or older")
    assert (found.requests, found.ok, found.failed) == (6, 5, 1)
    assert found.failed_source == "num_prompts - completed"
    assert (found.shape, found.concurrency, found.request_rate) == ("~100/~20", 2, "inf")
    assert value(found, "ttft_ms_p50") == 40.0
    assert value(found, "tpot_ms_p50") == 8.1
    assert value(found, "output_tps_wall") == 25.0
    assert found.metrics["vllm:request_goodput"].note == "null in the file"
    assert value(found, "e2e_ms_p50") is None
    assert found.metrics["e2e_ms_p50"].note == "not in the file"


def test_vllm_single_requests_fill_what_the_file_lacks_and_leave_failures_out() -> None:
    found = one(DATA / "vllm_2026_detailed.json")
    assert found.samples["ttft_ms"] == pytest.approx((30.0, 40.0, 50.0))
    assert found.samples["itl_ms"] == pytest.approx((10, 12, 11, 9, 10, 20))
    assert value(found, "ttft_ms_p95") == pytest.approx(49.0)
    assert found.metrics["ttft_ms_p95"].n == 3
    assert "computed here" in found.metrics["ttft_ms_p95"].note
    assert (found.shape, found.request_rate, found.failed, found.failed_source) == ("20/3", "3.5", 1, "")
    assert value(found, "vllm:request_goodput") == 4.0


def test_a_chat_backend_stamps_chunks_without_a_token_so_nothing_is_called_ours(saved: Saved) -> None:
    found = one(saved("vllm_2026_detailed.json", backend="openai-chat"))
    assert not [name for name in found.metrics if name.startswith(("ttft", "tpot", "itl", "e2e"))]
    assert value(found, "vllm:p50_ttft_ms") == 40.0
    assert "role" in found.metrics["vllm:p50_ttft_ms"].definition


def test_zero_throughout_means_no_sample(saved: Saved) -> None:
    zeros = {f"{s}_itl_ms": 0.0 for s in ("mean", "median", "std", "p99")}
    found = one(saved("vllm_2025.json", **zeros))
    assert value(found, "itl_ms_p50") is None and value(found, "itl_ms_mean") is None
    assert "no sample" in found.metrics["itl_ms_p50"].note
    assert value(found, "tpot_ms_p50") == 8.1


def test_a_run_without_success_has_no_throughput(saved: Saved) -> None:
    found = one(saved("vllm_2025.json", completed=0, output_throughput=0.0, request_throughput=0.0))
    assert value(found, "output_tps_wall") is None and value(found, "request_rate") is None
    assert found.failed == 6


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"mean_ttft_ms": 0.040}, "units mixed"),
        ({"ttfts": [30.0, 40.0, 50.0, 0.0]}, "units mixed"),
        ({"mean_itl_ms": 0.012}, "units mixed"),
        ({"p50_ttft_ms": 41.0}, "median_ttft_ms is 40.0, p50_ttft_ms is 41.0"),
        ({"p99_ttft_ms": 39.0}, "p99 ttft 39 < p50 40"),
        ({"mean_e2el_ms": 20.0}, "TTFT > E2E"),
        ({"mean_tpot_ms": -1.0}, "TPOT <= 0"),
        ({"completed": 5}, "completed 5 > num_prompts 4"),
        ({"failed": 2}, "completed 3 + failed 2 > num_prompts 4"),
        ({"errors": [""]}, "errors has 1 entries"),
        ({"completed": ...}, "completed"),
        ({"completed": float("nan")}, "is no count"),
        ({"mean_ttft_ms": "40"}, "is no number"),
        ({"ttfts": [None, 0.1, 0.1, 0.1]}, "is no time in seconds"),
        ({"request_rate": "fast"}, "is no request rate"),
        ({"duration": True}, "is no number"),
    ],
)
def test_vllm_numbers_that_cannot_be(saved: Saved, changes: dict[str, Any], said: str) -> None:
    path = saved("vllm_2026_detailed.json", **changes)
    with pytest.raises(UsageProblem) as caught:
        import_file(path, "vllm")
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), None])
def test_not_a_number_is_unknown_and_said(saved: Saved, bad: float | None) -> None:
    found = one(saved("vllm_2025.json", median_ttft_ms=bad))
    assert value(found, "ttft_ms_p50") is None
    assert "in the file" in found.metrics["ttft_ms_p50"].note
    assert bool(found.warnings) == (bad is not None)


def test_appended_vllm_results_are_one_a_line(tmp_path: Path) -> None:
    line = json.dumps(json.loads((DATA / "vllm_2025.json").read_text()))
    path = tmp_path / "all.json"
    path.write_text(f"{line}\n{line}")
    assert [r.source.rpartition(": ")[2] for r in import_file(path)] == ["line 1", "line 2"]


def test_chunked_tokens_are_suspected(saved: Saved) -> None:
    found = one(saved("vllm_2025.json", mean_itl_ms=1.9, median_itl_ms=0.003))
    assert any("median 0.003 vs mean 1.9: chunked tokens" in warning for warning in found.warnings)


def test_sglang_lines() -> None:
    native, oai = import_file(DATA / "sglang.jsonl")
    assert (native.shape, native.concurrency, native.request_rate) == ("256/64", 8, "inf")
    assert (oai.shape, oai.concurrency, oai.request_rate) == ("~256/~64", None, "4")
    assert value(native, "itl_per_token_ms_p50") == 13.0 and "itl_ms_p50" not in native.metrics
    assert value(oai, "itl_ms_p50") == 13.0 and "itl_per_token_ms_p50" not in oai.metrics
    assert value(native, "ttft_ms_p50") == 55.0
    assert "e2e_ms_p50" not in native.metrics and "tpot_ms_p50" not in native.metrics
    assert "end of the stream" in native.metrics["sglang:median_tpot_ms"].definition
    assert native.failed is None and native.requests is None


def test_sglang_numbers_that_contradict_each_other_are_refused(saved: Saved) -> None:
    path = saved(
        "sglang.jsonl",
        total_output_tokens=218000,
        total_output_tokens_retokenized=104000,
        median_tpot_ms=-0.0,
        mean_itl_ms=0.0,
        median_ttft_ms=607.2,
        median_e2e_latency_ms=607.0,
    )
    with pytest.raises(UsageProblem) as caught:
        import_file(path)
    for reason in ("retokenised/claimed = 0.477 < 0.5", "TTFT > E2E", "TPOT <= 0", "ITL == 0"):
        assert reason in str(caught.value)


def test_aiperf_records_leave_warmups_cancelled_and_failed_out_and_honour_units() -> None:
    found = one(DATA / "aiperf_records.jsonl")
    assert (found.ok, found.cancelled, found.failed, found.warmup_rows, found.requests) == (2, 2, 1, 1, 5)
    assert found.samples["ttft_ms"] == pytest.approx((100.0, 120.0))
    assert found.samples["itl_ms"] == pytest.approx((5, 7, 6, 8))
    assert value(found, "tpot_ms_p50") == pytest.approx(6.5)
    assert found.shape == "100/3"
    assert found.warnings == ("1 requests failed: 503 HTTPError: busy",)


def test_aiperf_summary_in_other_units() -> None:
    found = one(DATA / "aiperf_summary.json")
    assert (found.version, found.concurrency, found.ok, found.failed) == ("0.8.0", 4, 10, 0)
    assert value(found, "ttft_ms_p50") == pytest.approx(88.0)
    assert value(found, "e2e_ms_p50") == pytest.approx(6400.0)
    assert value(found, "tpot_ms_p50") == pytest.approx(13.3)
    assert value(found, "output_tps_wall") == 225.0
    assert found.duration_s == pytest.approx(20.0)


def test_summary_of_genai_perf(saved: Saved) -> None:
    """aiperf's forerunner: the same layout without a version, and the clients elsewhere."""
    asked = {"model": ["m"], "perf_analyzer": {"stimulus": {"concurrency": 8}}}
    rate = {"unit": "tok/s", "avg": 300.0}
    changes = {"schema_version": ..., "aiperf_version": ..., "input_config": asked}
    found = one(saved("aiperf_summary.json", output_token_throughput=rate, **changes))
    assert (found.tool, found.concurrency, found.ok) == ("aiperf", 8, 10)
    assert value(found, "output_tps_wall") == 300.0


def test_an_aiperf_error_may_be_text(tmp_path: Path) -> None:
    row = {"metadata": {"benchmark_phase": "profiling"}, "metrics": {}, "error": "connection lost"}
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(row))
    assert one(path).warnings == ("1 requests failed: connection lost",)


def test_aiperf_number_without_a_unit_is_unknown(saved: Saved) -> None:
    found = one(saved("aiperf_summary.json", time_to_first_token=90.0))
    assert value(found, "ttft_ms_p50") is None
    assert "without a unit" in found.metrics["ttft_ms_p50"].note


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"schema_version": "2.0"}, "schema_version 2.0 (aiperf 0.8.0); this version reads 1.x"),
        ({"time_to_first_token": {"unit": "fortnights", "avg": 1.0}}, "'fortnights' is not a known unit"),
        ({"output_token_throughput": {"unit": "tokens/min", "avg": 1.0}}, "'tokens/min' is not known"),
    ],
)
def test_aiperf_refusals(saved: Saved, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageProblem, match="some-name") as caught:
        import_file(saved("aiperf_summary.json", **changes))
    assert said in str(caught.value)


def test_guidellm_reads_successes_of_every_benchmark_and_seconds_as_seconds() -> None:
    first, second = import_file(DATA / "guidellm_v2.json")
    assert (first.version, first.request_rate, first.concurrency) == ("0.8.0", "1", None)
    assert second.concurrency == 4
    assert (first.requests, first.ok, first.failed, first.cancelled) == (10, 8, 1, 1)
    assert value(first, "ttft_ms_p50") == 45.0
    assert value(first, "tpot_ms_p95") == 9.8
    assert value(first, "guidellm:request_latency_ms_p50") == pytest.approx(690.0)
    assert value(first, "guidellm:time_per_output_token_ms_p50") == 10.8
    assert first.shape == "~256/~64"
    assert first.duration_s == 12.5


@pytest.mark.parametrize("version", [1, 3, None, "2"])
def test_guidellm_of_another_version_is_refused(saved: Saved, version: object) -> None:
    path = saved("guidellm_v2.json", metadata={"version": version, "guidellm_version": "0.3.1"})
    with pytest.raises(UsageProblem) as caught:
        import_file(path)
    assert f"version {version} (guidellm 0.3.1); this version reads 2" in str(caught.value)


def test_mooncake_trace_is_a_load_not_a_measurement() -> None:
    found = one(DATA / "mooncake.jsonl")
    assert (found.requests, found.ok, found.duration_s) == (3, None, 4.0)
    assert value(found, "mooncake:requests_per_second") == pytest.approx(0.5)
    assert value(found, "mooncake:shared_block_share") == pytest.approx(2 / 5)
    assert found.warnings


@pytest.mark.parametrize(
    "content, said",
    [
        ("", "empty"),
        ("{", "not whole JSON"),
        ("[1, 2]", "JSON list"),
        ('{"a": 1}', "its keys: a"),
        ('{"a": 1}', "guidellm JSON report of version 2"),
    ],
)
def test_what_is_no_result_file(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(UsageProblem) as caught:
        import_file(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_unreadable_files_and_formats(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="did you mean 'vllm'"):
        import_file(DATA / "vllm_2025.json", "vlm")
    with pytest.raises(UsageProblem, match="is a folder"):
        import_file(tmp_path)
    with pytest.raises(UsageProblem, match="cannot be read"):
        import_file(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageProblem, match="not UTF-8"):
        import_file(tmp_path / "binary")


FILES = sorted(path.name for path in DATA.iterdir())
DAMAGE: tuple[Any, ...] = (
    *(None, True, -1, 0, -0.0, 1.5, 10**20, 10**400, float("nan"), float("inf"), "", "x"),
    *([], [1], [[1]], [None], ["x"], {}, {"a": 1}, {"avg": None}, {"value": None}),
)


def places(data: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key and index of nested JSON."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in inner for place in ((*above, key), *places(value, (*above, key)))]


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_any_damage_is_read_or_refused_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(FILES))
    text = (DATA / name).read_text()
    lines = [json.loads(line) for line in (text.splitlines() if name.endswith("l") else [text])]
    *above, last = data.draw(st.sampled_from(places(lines)[1:]))
    inner: Any = lines
    for key in above:
        inner = inner[key]
    inner[last] = data.draw(st.sampled_from(DAMAGE))
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    try:
        results = import_file(path)
    except UsageProblem:
        return
    for result in results:
        json.dumps(result.to_json(), allow_nan=False)
        for metric in result.metrics.values():
            assert metric.value is not None or metric.note
            assert not isinstance(metric.value, bool)


def test_beside_matches_the_cell_of_equal_load_and_compares_only_equal_definitions(saved: Saved) -> None:
    path = saved("vllm_2025.json", total_input_tokens=2560, total_output_tokens=1280, max_concurrency=4)
    found = one(path)
    cells = [outcome("in512-out256-c4", ttft_ms_p50=32.0), outcome("in512-out256-c8", ttft_ms_p50=1.0)]
    (cell,) = matching(found, cells, None)
    assert cell.result.cell == "in512-out256-c4"
    by_name = {row.metric: row for row in rows(found, [cell])}
    assert by_name["ttft_ms_p50"].ours[0].change == pytest.approx(0.25)
    assert by_name["ttft_ms_p50"].same
    assert not by_name["vllm:std_ttft_ms"].same and by_name["vllm:std_ttft_ms"].ours[0].value is None
    with pytest.raises(UsageProblem, match="no cell of ~100/~20 at concurrency 2"):
        matching(one(DATA / "vllm_2025.json"), cells, None)
    with pytest.raises(UsageProblem, match="say which cell"):
        matching(one(DATA / "aiperf_records.jsonl"), cells, None)
    with pytest.raises(UsageProblem, match="no such cell"):
        matching(found, cells, "in1-out1-c1")


def test_the_command_shows_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run(tmp_path / "run")
    file, out = DATA / "vllm_2025.json", tmp_path / "read.json"
    assert (
        main(["import", str(file), "--beside", str(run), "--cell", "in512-out256-c4", "--json", str(out)])
        == 0
    )
    said = capsys.readouterr()
    assert "num_prompts - completed" in said.out and "aggregated-3x" in said.out
    assert "in512-out256-c4 is another load" in said.err
    assert json.loads(out.read_text())[0]["metrics"]["ttft_ms_p50"]["value"] == 40.0
    assert main(["import", str(file), "--cell", "x"]) == 2
    assert main(["import", str(tmp_path / "none")]) == 2


@pytest.mark.skipif(not (SHARED / "samples").is_dir(), reason="the shared samples do not lie beside it")
def test_shared_samples_are_all_read() -> None:
    samples = SHARED / "samples"
    paths = [
        *samples.glob("vllm_bench_*.json"),
        *samples.glob("sglang_bench_*.jsonl"),
        *samples.glob("aiperf_*"),
        *samples.glob("guidellm_*.json"),
        *samples.glob("*/bench_*.json"),
    ]
    assert len(paths) >= 5
    for path in paths:
        for found in import_file(path):
            assert any(metric.value is not None for metric in found.metrics.values()), path
            if path.parent != samples:
                shape = tuple(float(part) for part in path.stem.split("_")[-3:-1])
                assert (found.input_tokens, found.output_tokens) == shape
                assert found.concurrency == int(path.stem.rpartition("_c")[2])
                assert value(found, "ttft_ms_p50") and value(found, "tpot_ms_p50")
