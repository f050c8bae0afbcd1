"""What is shown while a run goes on: on a terminal an area, in a log a bounded number of lines."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pytest
from rich.console import Console, RenderableType

from pytest_pdperf.load.progress import Progress
from pytest_pdperf.narrating import FIRST_LINE_S, LINES_AN_E_FOLD, Narrator
from pytest_pdperf.report.live import Rate
from pytest_pdperf.stack.eta import Remaining

CELLS = [("pd", "in512-out256-c4"), ("pd", "in512-out256-c8"), ("agg", "in512-out256-c4")]


class FakeScreen:
    """Keeps what it was told; as wide as a terminal often is."""

    def __init__(self, live: bool) -> None:
        self.live = live
        self.lines: list[tuple[str, bool]] = []
        self.area = ""
        self.draws = 0

    def line(self, text: str, detail: bool = False) -> None:
        self.lines.append((text, detail))

    def draw(self, renderable: RenderableType) -> None:
        out = io.StringIO()
        Console(file=out, width=100).print(renderable)
        self.area = out.getvalue()
        self.draws += 1

    def erase(self) -> None:
        self.area = ""

    def told(self) -> list[str]:
        return [text for text, detail in self.lines if not detail]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def narrator(live: bool) -> tuple[Narrator, FakeScreen, Clock]:
    screen, clock = FakeScreen(live), Clock()
    tell = Narrator(screen, clock)
    guesses: Mapping[tuple[str, str], float] = dict.fromkeys(CELLS, 60.0)
    tell.plan(CELLS, lambda: Remaining(guesses, {"pd": 30.0, "agg": 30.0}))
    return tell, screen, clock


def measured(done: int, elapsed_s: float, tokens: int, failed: int = 0) -> Progress:
    return Progress("measure", done, 32, 4, failed, elapsed_s, tokens, (40.0, 52.4, 90.0), (11.0, 12.14))


def test_a_terminal_shows_cell_numbers_and_time_left() -> None:
    tell, screen, clock = narrator(live=True)
    with tell.bringing_up("pd"):
        clock.now += 20
        tell.stage("prefill-0: loading weights")
        assert "bringing up pd" in screen.area
        assert "prefill-0: loading weights" in screen.area
        clock.now += 10
    with tell.measuring(*CELLS[0]):
        clock.now += 3
        tell.progress(measured(4, 1.0, 1000))
        clock.now += 2
        tell.progress(measured(12, 3.0, 2640, failed=2))
    assert "last fault" not in screen.area
    tell.judged("node", "FAIL", ("decode slowed (decode-0): 12 ms", "another"))
    tell.judged("other", "PASS")
    with tell.measuring(*CELLS[1]):
        clock.now += 1
        tell.progress(measured(12, 3.0, 2640, failed=1))
        shown = screen.area
    assert "cell 2 of 3: pd in512-out256-c8" in shown
    assert "measure 12/32" in shown
    assert "last fault: decode slowed (decode-0): 12 ms" in shown and "another" not in shown
    assert "4 in flight" in shown
    assert "TTFT 52.4 ms" in shown
    assert "ITL 11.6 ms" in shown
    assert "   1 error\n" in shown
    assert "1 of 3 cells done" in shown
    assert "1 FAIL" in shown
    assert "ETA 39 s" in shown, "2 cells at 5 s each for 60 guessed, one bring-up of 30 s, one second gone"
    assert all(len(row) <= 100 for row in shown.splitlines())
    assert screen.area == "", "nothing stays when nothing goes on"
    assert screen.told() == []


def test_an_area_is_not_drawn_more_often_than_one_can_look() -> None:
    tell, screen, clock = narrator(live=True)
    with tell.measuring(*CELLS[0]):
        before = screen.draws
        for _ in range(1000):
            clock.now += 0.01
            tell.tick()
    assert 30 <= screen.draws - before <= 41


def test_an_error_ends_the_area_and_leaves_the_cell_uncounted() -> None:
    tell, screen, clock = narrator(live=True)
    with pytest.raises(KeyboardInterrupt), tell.measuring(*CELLS[0]):
        clock.now += 1
        tell.tick()
        assert screen.area
        raise KeyboardInterrupt
    assert screen.area == ""
    with tell.measuring(*CELLS[1]):
        clock.now += 1
        tell.tick()
        assert "ETA 3 min" in screen.area, "the pace of a broken-off cell teaches nothing"


def test_cells_that_were_passed_over_are_not_waited_for() -> None:
    tell, screen, clock = narrator(live=True)
    with tell.measuring(*CELLS[2]):
        clock.now += 1
        tell.tick()
        assert "cell 3 of 3" in screen.area
        assert "2 of 3 cells done" in screen.area
        assert "ETA 89 s" in screen.area


@pytest.mark.parametrize(("hours", "most"), [(1 / 12, 20), (0.5, 90), (8, 210)])
def test_a_log_gets_few_lines_however_long_the_run(hours: float, most: int) -> None:
    tell, screen, clock = narrator(live=False)
    with tell.measuring(*CELLS[0]):
        elapsed = 0.0
        while elapsed < hours * 3600:
            clock.now += 2.5
            elapsed += 2.5
            tell.progress(measured(4, elapsed, int(400 * elapsed)))
    lines = screen.told()
    assert most / 2 < len(lines) <= most
    assert len(lines) >= 5
    assert lines[0].startswith("pdperf: cell 1 of 3: pd in512-out256-c4 for 15 s, measure 4/32, TTFT 52.4 ms")
    assert "400 tok/s, 0 errors, 0 of 3 cells done" in lines[0]
    assert "\n" not in "".join(lines)


def test_a_short_run_in_a_log_is_not_narrated_but_a_slow_start_is() -> None:
    tell, screen, clock = narrator(live=False)
    with tell.bringing_up("pd"):
        clock.now += 2
        tell.stage("prefill-0: loading weights (2 s)")
    assert screen.told() == ["pdperf: bringing up pd"]
    with tell.bringing_up("agg"):
        clock.now += 2 * FIRST_LINE_S
        tell.stage("server-0: capturing graphs (30 s)")
    assert "pdperf: server-0: capturing graphs (30 s)" in screen.told()


def test_a_line_that_was_just_written_is_not_said_again() -> None:
    tell, screen, clock = narrator(live=False)
    clock.now += 500
    with tell.bringing_up("pd"):
        clock.now += 1
        tell.tick()
    assert screen.told() == ["pdperf: bringing up pd"]


def test_a_fresh_launch_is_called_one() -> None:
    tell, screen, clock = narrator(live=True)
    with tell.measuring("pd-launch1001", "in512-out256-c4"):
        clock.now += 1
        tell.tick()
        assert "fresh launch: pd-launch1001 in512-out256-c4" in screen.area
        assert "0 of 3 cells done" in screen.area


def test_tokens_a_second_belong_to_one_phase_and_the_latest_seconds() -> None:
    rate = Rate()
    assert rate.tps is None
    rate.add(Progress("warm-up", 0, 1, 1, 0, 1.0, 5000))
    rate.add(measured(0, 2.0, 0))
    assert rate.tps is None
    for second in range(1, 31):
        rate.add(measured(1, 2.0 + second, 100 * min(second, 20) + 300 * max(0, second - 20)))
    assert rate.tps == pytest.approx(300)


def test_the_bound_is_what_the_docstring_says() -> None:
    assert 600 / FIRST_LINE_S == LINES_AN_E_FOLD
