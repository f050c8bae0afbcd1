"""The Markdown report: tables with the better value in bold, sentences, holes, and no markup from outside."""

from pathlib import Path

import pytest

from pytest_pdperf.report.markdown import escape, render, write_markdown
from pytest_pdperf.report.outcomes import save
from pytest_pdperf.report.source import Hole, Run, load_run, open_source
from tests.unit.report.report_data import outcome, small_run

PUBLISHED = Path(__file__).parents[3] / "baselines" / "published" / "h100-qwen3-32b.json"


def cells(line: str) -> list[str]:
    return [part.strip() for part in line.strip("|").split(" | ")]


def table_after(lines: list[str], heading: str) -> list[list[str]]:
    start = lines.index(heading) + 2
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    return [cells(line) for line in lines[start:end]]


def test_the_better_value_is_bold_in_either_direction(tmp_path: Path) -> None:
    pd = outcome(ttft_ms_p50=200.0, output_tps=1100.0)
    aggregated = outcome(topology="aggregated-3x", ttft_ms_p50=100.0, output_tps=1000.0)
    lines = list(render([Run(name="r", folder=tmp_path, outcomes=(pd, aggregated))]))
    head, _, first, second = table_after(lines, "## 512/256 tokens in/out")
    assert head[:4] == ["concurrency", "topology", "TTFT p50 (ms)", "output throughput (tok/s)"]
    assert first == ["1", "pd-1p2d", "200.0", "**1,100**", "64/64", "proven", "PASS"]
    assert second == ["1", "aggregated-3x", "**100.0**", "1,000", "64/64", "–", "PASS"]


def test_what_was_noticed_in_a_cell_that_passed_is_told(tmp_path: Path) -> None:
    made = (outcome(verdict="PASS", rows=("noticed: KV transfer slowed",)), outcome("in512-out256-c4"))
    text = "\n".join(render([Run(name="r", folder=tmp_path, outcomes=made)]))
    assert text.count("noticed: KV transfer slowed") == 1


def test_concurrencies_rise_within_a_shape(tmp_path: Path) -> None:
    made = tuple(outcome(f"in512-out256-c{c}") for c in (16, 1, 4))
    lines = list(render([Run(name="r", folder=tmp_path, outcomes=made)]))
    assert [row[0] for row in table_after(lines, "## 512/256 tokens in/out")[2:]] == ["1", "4", "16"]


def test_a_whole_run_has_every_part(tmp_path: Path) -> None:
    text = write_markdown([load_run(small_run(tmp_path / "run"))], tmp_path / "report.md").read_text()
    for heading in (
        "Verdicts",
        "Environment",
        "512/256 tokens in/out",
        "Trade-offs",
        "Limitations",
        "Definitions",
    ):
        assert f"\n## {heading}\n" in text
    assert (
        "SIMULATED" in text and "TTFT p50 is higher on pd-1p2d than on aggregated-3x in 3 of 3 cells" in text
    )


def test_the_published_table_keeps_its_numbers_and_its_source(tmp_path: Path) -> None:
    lines = list(render([open_source(PUBLISHED)]))
    row = next(r for r in table_after(lines, "## 8192/128 tokens in/out") if r[:2] == ["16", "pd-tcp"])
    assert row[2:] == ["17,514", "26,392", "**13.97**", "**18.32**", "98.15", "64/64", "–", "–"]
    assert any("GPUStack Operator documentation" in line for line in lines)
    assert not any("Benefits" in line and "43%" in line for line in lines)


def test_holes_stand_at_their_place_and_in_a_list(tmp_path: Path) -> None:
    save(outcome(), tmp_path / "cells")
    run = load_run(tmp_path)
    broken = Run(
        name="r",
        folder=tmp_path,
        outcomes=run.outcomes,
        holes=(Hole("pd-1p2d", 1, "in512-out256-c4", "half-written"),),
    )
    lines = list(render([broken]))
    assert table_after(lines, "## 512/256 tokens in/out")[-1][-1] == "missing: half-written"
    assert "- pd-1p2d in512-out256-c4: half-written" in lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a|b", r"a\|b"),
        ("<script>x</script>", "&lt;script&gt;x&lt;/script&gt;"),
        ("two\nlines\r\n# head", r"two lines \# head"),
        ("[x](http://e)", r"\[x\](http://e)"),
        ("`code` *b* _i_ @you", r"\`code\` \*b\* \_i\_ \@you"),
        ("\x1b[31mred\u202e", r"�\[31mred�"),
    ],
)
def test_text_from_outside_is_escaped(text: str, shown: str) -> None:
    assert escape(text) == shown


def test_hostile_rows_cannot_leave_their_block(tmp_path: Path) -> None:
    bad = outcome(
        "in512-out256-c1", verdict="FAIL", rows=("x\n```\n# injected\n| a | b |", "![](http://e/p.png)")
    )
    lines = list(render([Run(name="<b>r</b>", folder=tmp_path, outcomes=(bad,))]))
    assert lines[0] == "# &lt;b&gt;r&lt;/b&gt;"
    for line in lines:
        assert not line.startswith(("# injected", "```", "![]"))
