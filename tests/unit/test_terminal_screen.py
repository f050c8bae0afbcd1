"""Where an area may be drawn, and who is told what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_pdperf.terminal_screen import PytestScreen


class Reporter:
    """pytest's terminal reporter, as far as it is used."""

    def __init__(self, verbosity: int = 0, isatty: bool = True) -> None:
        self.verbosity = verbosity
        self.isatty = isatty
        self.lines: list[str] = []

    def ensure_newline(self) -> None:
        self.lines.append("")

    def write_line(self, text: str) -> None:
        self.lines.append(text)


def screen(
    reporter: Reporter | None, environ: dict[str, str] | None = None, log_cli: bool = False
) -> PytestScreen:
    plugins = {"terminalreporter": reporter}
    config: Any = SimpleNamespace(
        pluginmanager=SimpleNamespace(get_plugin=plugins.get),
        getini={"log_cli": log_cli}.__getitem__,
        getoption=lambda name, default: default,
    )
    return PytestScreen(cast(pytest.Config, config), {"TERM": "xterm", **(environ or {})})


def test_an_area_needs_a_terminal_of_its_own() -> None:
    assert screen(Reporter()).live
    assert screen(Reporter(verbosity=1)).live
    assert not screen(Reporter(verbosity=-1)).live
    assert not screen(Reporter(isatty=False)).live
    assert not screen(Reporter(), {"CI": "true"}).live
    assert not screen(Reporter(), {"TERM": "dumb"}).live
    assert not screen(Reporter(), log_cli=True).live
    assert not screen(None).live, "-p no:terminal, and workers of xdist"


@pytest.mark.parametrize(
    ("verbosity", "told"), [(-1, []), (0, ["", "line"]), (1, ["", "line", "", "detail"])]
)
def test_lines_follow_verbosity(verbosity: int, told: list[str]) -> None:
    reporter = Reporter(verbosity)
    shown = screen(reporter)
    shown.line("line")
    shown.line("detail", detail=True)
    assert reporter.lines == told


def test_without_a_reporter_nothing_is_said() -> None:
    shown = screen(None)
    shown.line("line")
    shown.erase()
