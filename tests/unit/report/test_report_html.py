"""The page: complete, self-contained, escaped, and honest about what it does not have."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pytest_pdperf.gate.verdict import Verdict
from pytest_pdperf.measure.records import Status
from pytest_pdperf.measure.table import METRICS
from pytest_pdperf.report.cell_view import cell_views
from pytest_pdperf.report.grid import build_grid
from pytest_pdperf.report.heat import against_baseline, against_reference, columns_of
from pytest_pdperf.report.html import write_html
from pytest_pdperf.report.outcomes import save
from pytest_pdperf.report.source import Run, load_run, open_source
from pytest_pdperf.spec.workload import Cell
from tests.unit.report.report_data import (
    cell_of,
    judged_row,
    outcome,
    request,
    small_run,
    split,
    write_cell,
    write_environment,
)

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 17 * 1009 }}{% raw %}",
    "</title></style></script><svg onload=alert(1)>",
    "\u202egnp.exe\x00\x1b[31m",
)
PUBLISHED = Path(__file__).parents[3] / "baselines" / "published" / "h100-qwen3-32b.json"


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.unclosed: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input", "br", "img"):
            self.unclosed.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.unclosed and self.unclosed[-1] == tag, f"</{tag}> closes {self.unclosed[-3:]}"
        self.unclosed.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def page(tmp_path: Path, *runs: Run) -> tuple[Page, str]:
    text = write_html(runs, tmp_path / "report.html").read_text(encoding="utf-8")
    return Page(text), text


def test_the_page_is_whole_and_needs_no_network(tmp_path: Path) -> None:
    found, text = page(tmp_path, load_run(small_run(tmp_path / "run")))
    assert found.unclosed == []
    for tag, attributes in found.tags:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:,")), f"<{tag} {name}={value}>"
    assert "@import" not in text and "url(" not in text
    assert "SIMULATED engines" in text and "<title>SIMULATED: run" in text
    assert not list(tmp_path.glob("*.part"))


def test_every_cell_has_its_pictures_and_every_number_its_words(tmp_path: Path) -> None:
    found, text = page(tmp_path, load_run(small_run(tmp_path / "run")))
    assert text.count("TTFT distribution") == text.count("ITL distribution") == 3
    assert text.count("Token timeline: ") == 6
    assert "Over concurrency" in text and "Knee" in text
    for tag, attributes in found.tags:
        if tag == "td" and (attributes.get("class") or "").startswith("n "):
            words = attributes.get("title") or ""
            assert "n=" in words and (" ms" in words or "tok/s" in words), words
            assert any(metric.definition in words for metric in METRICS.values())


def test_a_real_run_carries_no_banner(tmp_path: Path) -> None:
    save(outcome(engine="vllm"), tmp_path / "run" / "cells")
    _, text = page(tmp_path, load_run(tmp_path / "run"))
    assert "SIMULATED" not in text


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_text_from_outside_becomes_markup(tmp_path: Path, hostile: str) -> None:
    run = tmp_path / "run"
    name = f"pd {hostile}".replace("/", "_").replace("\x00", "")
    bad = request(1, status=Status.HTTP_ERROR, gaps_ms=(), error=hostile)
    made = write_cell(run, "pd-x", cell_of(), [request(0), bad], verdict="INVALID", rows=(hostile,))
    save(
        replace(
            made,
            topology=name,
            nodeid=hostile,
            evidence=hostile,
            evidence_reasons=(hostile,),
            engine=hostile,
            result=replace(made.result, errors={hostile: 1}, warnings=(hostile,), status_counts={hostile: 1}),
            ttft_split=split(10.0, prefill=5.0),
        ),
        run / "cells",
    )
    write_environment(
        run, "pd-x", commands={hostile: hostile}, facts={hostile: hostile}, cpu=hostile, new=[hostile]
    )
    (run / "cells" / f"bad{name}--{name}.json").write_text("{")
    _, plain = page(tmp_path, load_run(small_run(tmp_path / "plain")))
    found, text = page(tmp_path, load_run(run))
    assert found.unclosed == []
    assert found.count("script") == 1 and found.count("img") == 0
    assert not [1 for _, attributes in found.tags if any(key.startswith("on") for key in attributes)]
    assert {tag for tag, _ in found.tags} <= {tag for tag, _ in Page(plain).tags} | {"rect"}
    assert "17153" not in text
    assert not set(text) & {"\x00", "\x1b", "\u202e"}


def test_what_is_broken_is_said_in_place_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    (run / "cells" / "pd-1p2d--in512-out256-c4.json").write_text('{"schema": 99}')
    stamps = run / "records" / "aggregated-3x" / "in512-out256-c8" / "stamps.bin"
    stamps.write_bytes(stamps.read_bytes()[:100])
    (run / "records" / "pd-1p2d" / "in512-out256-c8" / "records.json").unlink()
    found, text = page(tmp_path, load_run(run))
    assert found.unclosed == []
    assert "missing: written by a newer version (schema 99" in text
    assert "aggregated-3x: the records of single requests cannot be read: stamps.bin is shorter" in text
    assert "pd-1p2d: the records of single requests are not in the run" in text
    assert text.count("TTFT distribution") == 2


def test_an_empty_run_is_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "run" / "cells").mkdir(parents=True)
    found, text = page(tmp_path, load_run(tmp_path / "run"))
    assert found.unclosed == [] and text.count("No cell was measured") == 2
    assert "No environment was recorded" in text


def test_failing_cells_are_unfolded_and_name_their_item(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for order, verdict in enumerate(("PASS", "FAIL", "PASS")):
        cell = cell_of(concurrency=(1, 4, 8)[order])
        write_cell(
            run, "pd-1p2d", cell, [request(i) for i in range(8)], order=order, verdict=verdict, rows=("x",)
        )
    _, text = page(tmp_path, load_run(run))
    assert text.count("<details open>") == 2
    assert text.count("pytest &#39;tests/perf") + text.count("pytest 'tests/perf") == 1


def test_stage_bars_stand_where_a_split_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_cell(run, "pd-1p2d", cell_of(), [request(0)], ttft_split=split(100.0, prefill=60.0))
    _, text = page(tmp_path, load_run(run))
    assert "Stages of the mean TTFT" in text and "not explained +40.0 ms (+40%)" in text


def test_runs_and_the_published_table_stand_side_by_side(tmp_path: Path) -> None:
    run = load_run(small_run(tmp_path / "run"))
    found, text = page(tmp_path, run, open_source(PUBLISHED))
    assert found.unclosed == []
    assert "h100-qwen3-32b: published" in text and "pd-tcp" in text
    assert "in8192-out128-c16" in text and "output throughput, wall" in text


@pytest.mark.parametrize(
    ("verdict", "change", "tone"),
    [
        (Verdict.PASS, 0.04, "flat"),
        (Verdict.PASS, 0.06, "worse1"),
        (Verdict.PASS, -0.06, "better1"),
        (Verdict.FAIL, 0.02, "worse3"),
        (Verdict.IMPROVED, -0.3, "better3"),
        (Verdict.NOISY, 0.3, "noisy"),
    ],
)
def test_colours_against_the_baseline(verdict: Verdict, change: float, tone: str) -> None:
    row = judged_row("ttft_ms_p50", verdict, 100 * (1 + change), 100.0, change)
    tile = against_baseline(outcome(ttft_ms_p50=100 * (1 + change), judged=(row,)), METRICS["ttft_ms_p50"])
    assert tile.tone == tone
    assert f"{change:+.0%}" == tile.change
    assert "limit 10.0%" in tile.tip and "n=64" in tile.tip


def test_less_throughput_reads_as_minus_and_is_worse() -> None:
    row = judged_row("output_tps", Verdict.PASS, 80.0, 100.0, 0.2)
    tile = against_baseline(outcome(output_tps=80.0, judged=(row,)), METRICS["output_tps"])
    assert (tile.change, tile.tone) == ("-20%", "worse2")


def test_without_a_comparison_a_number_is_only_a_number() -> None:
    tile = against_baseline(outcome(ttft_ms_p50=80.0), METRICS["ttft_ms_p50"])
    assert (tile.text, tile.change, tile.tone) == ("80", "", "plain")
    void = against_baseline(outcome(ttft_ms_p50=None), METRICS["ttft_ms_p50"])
    assert (void.text, void.tone) == ("–", "void")


def test_side_by_side_colours_compare_with_the_reference() -> None:
    pd = outcome(ttft_ms_p50=200.0, output_tps=900.0)
    aggregated = outcome(topology="aggregated-3x", ttft_ms_p50=100.0, output_tps=1000.0)
    grid = build_grid([Run(name="r", folder=Path("r"), outcomes=(pd, aggregated))])
    (row,) = grid.rows
    (first, one), (second, other) = row.outcomes()
    tile = against_reference(grid, row, first, one, METRICS["ttft_ms_p50"])
    assert (tile.change, tile.tone) == ("+100%", "worse2")
    assert "aggregated-3x: 100.0 ms" in tile.tip
    assert against_reference(grid, row, first, one, METRICS["output_tps"]).change == "-10%"
    assert against_reference(grid, row, second, other, METRICS["ttft_ms_p50"]).tone == "plain"
    assert [metric.id for metric in columns_of(grid)] == ["ttft_ms_p50", "output_tps"]


@pytest.mark.parametrize(("change", "text"), [(0.004, "0%"), (-0.004, "0%"), (0.006, "+1%"), (-0.5, "-50%")])
def test_a_change_that_rounds_to_nothing_has_no_sign(change: float, text: str) -> None:
    row = judged_row("ttft_ms_p50", Verdict.PASS, 100.0, 100.0, change)
    assert against_baseline(outcome(ttft_ms_p50=100.0, judged=(row,)), METRICS["ttft_ms_p50"]).change == text


def test_all_numbers_stand_in_the_order_of_the_metric_table(tmp_path: Path) -> None:
    save(
        outcome(tpot_ms_p50=5.0, ttft_ms_p50=1.0, client_lag_ms_p50=0.1, output_tps=9.0),
        tmp_path / "run" / "cells",
    )
    (view,) = cell_views(build_grid([load_run(tmp_path / "run")]))
    assert [line.label for line in view.numbers] == [
        "TTFT p50",
        "TPOT p50",
        "output throughput",
        "client lag p50",
    ]


def test_the_better_of_all_numbers_is_marked(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(outcome(ttft_ms_p50=2.0, output_tps=9.0), run / "cells")
    save(outcome(topology="aggregated-3x", ttft_ms_p50=1.0, output_tps=5.0), run / "cells")
    (view,) = cell_views(build_grid([load_run(run)]))
    marked = {line.label: [text for text, _, best in line.values if best] for line in view.numbers}
    assert marked == {"TTFT p50": ["1"], "output throughput": ["9"]}


def test_streams_of_a_mixed_cell_are_told_apart(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shape = cell_of().streams[0]
    cell = Cell(
        workload="mixed-load",
        id="mixed",
        streams=tuple(shape.model_copy(update={"name": name, "requests": 2}) for name in ("steady", "burst")),
    )
    requests = [request(i, sent_ms=i * 130.0, stream=name) for name in ("steady", "burst") for i in range(2)]
    write_cell(run, "pd-1p2d", cell, requests)
    _, text = page(tmp_path, load_run(run))
    assert text.count("; solid: steady, dashed: burst") == 2
    assert "streams, from strong to light: steady, burst" in text
    assert "burst: TTFT p50" in text and text.count('class="mark s1"') == 2
