"""Live progress inside a real pytest: on a terminal it comes and goes without a trace, elsewhere it is lines."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

ROWS, COLUMNS = 24, 100
LEAN = ("-p", "no:cacheprovider", "-p", "pytest_pdperf.plugin")
"""With PYTEST_DISABLE_PLUGIN_AUTOLOAD: a start without other plugins is much shorter."""

WATCHED = """
import time
import pytest
from pytest_pdperf.load.progress import Progress
from pytest_pdperf.narrating import Narrator
from pytest_pdperf.terminal_screen import PytestScreen

class Clock:
    now = 0.0
    def __call__(self):
        self.now += 20.0
        return self.now

@pytest.mark.parametrize("cell", ["one", "two", "three"])
def test_cell(cell, request, capfd):
    print("captured before")
    tell = Narrator(PytestScreen(request.config), Clock())
    tell.plan([("pd", cell)], lambda: None)
    with tell.measuring("pd", cell):
        for done in range(3):
            tell.progress(Progress("measure", done, 9, 2, 0, float(done), 70 * done, (31.0,), (7.0,)))
        if cell == "two":
            tell("a line that stays")
            tell.tick()
    print("captured after")
    assert capfd.readouterr() == ("captured before\\ncaptured after\\n", "")
    if cell == "three":
        raise AssertionError('of its own')
"""


class Terminal:
    """As much of a terminal as pytest and rich speak to: text, line ends, cursor up, to a column, erase."""

    def __init__(self) -> None:
        self.rows: dict[int, list[str]] = {}
        self.y = self.x = 0
        self.ever = ""
        self.hidden = False

    def feed(self, text: str) -> None:
        for plain, sequence in re.findall(r"([^\x1b]+)|\x1b(\[[0-9;?]*[A-Za-z])", text):
            if plain:
                self._write(plain)
            else:
                self._control(sequence[1:-1], sequence[-1])

    def _write(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self.y += 1
            elif character == "\r":
                self.x = 0
            else:
                row = self.rows.setdefault(self.y, [])
                row += " " * (self.x + 1 - len(row))
                row[self.x] = character
                self.x += 1
                assert self.x <= COLUMNS or "cell" not in "".join(row), "a row of the area is too wide"
        self.ever += "\n" + self.text()

    def _control(self, value: str, kind: str) -> None:
        if kind == "A":
            self.y -= int(value or 1)
        elif kind == "G":
            self.x = int(value or 1) - 1
        elif kind == "K":
            row = self.rows.setdefault(self.y, [])
            del row[0 if value == "2" else self.x :]
        elif value == "?25":
            self.hidden = kind == "l"
        else:
            assert kind == "m", f"unexpected control {value}{kind}"

    def text(self) -> str:
        return "\n".join("".join(self.rows.get(y, [])).rstrip() for y in range(max(self.rows, default=0) + 1))


def in_a_terminal(folder: Path, *arguments: str) -> Terminal:
    """Run pytest with a terminal as its output and show what that looks like."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "CI", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *LEAN, *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=other,
        stderr=other,
        env={**env, "TERM": "xterm-256color", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    os.close(other)
    raw = b""
    try:
        while chunk := os.read(main, 65536):
            raw += chunk
    except OSError:
        pass  # how Linux says that the other side is closed
    process.wait(60)
    os.close(main)
    terminal = Terminal()
    terminal.feed(raw.decode())
    return terminal


def test_the_area_comes_and_goes_and_dots_stay_on_their_line(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_watched=WATCHED)
    seen = in_a_terminal(pytester.path)
    assert "cell 1 of 1: pd one" in seen.ever
    assert "measure 2/9 2 in flight" in seen.ever
    assert "TTFT 31 ms   ITL 7 ms   70 tok/s   0 errors" in seen.ever
    left = seen.text()
    assert "in flight" not in left
    assert "tok/s" not in left
    dots = r"^test_watched\.py \.\npdperf: a line that stays\n\.\ntest_watched\.py F +\[100%\]$"
    assert re.search(dots, left, re.MULTILINE), left
    assert not seen.hidden


def test_names_keep_their_results_and_ctrl_c_leaves_the_terminal_as_it_was(pytester: pytest.Pytester) -> None:
    raising = WATCHED.replace('if cell == "two":', 'if cell == "two":\n            raise KeyboardInterrupt')
    pytester.makepyfile(test_watched=raising)
    seen = in_a_terminal(pytester.path, "-v")
    left = seen.text()
    assert re.search(r"^test_watched\.py::test_cell\[one\] PASSED +\[ 33%\]$", left, re.MULTILINE), left
    assert "pd two" in seen.ever
    assert "in flight" not in left
    assert "KeyboardInterrupt" in left
    assert not seen.hidden


def test_a_pipe_gets_plain_lines(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(test_watched=WATCHED)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    result = pytester.runpytest_subprocess(*LEAN)
    result.stdout.fnmatch_lines(
        ["pdperf: cell 1 of 1: pd one for *measure 1/9, TTFT 31 ms, ITL 7 ms*0 errors*"]
    )
    assert "\x1b" not in result.stdout.str()
