"""The narrator's way to pytest's own output: past its capture, below its dots, never in a worker or a quiet run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO

import pytest
from rich.console import Console, RenderableType
from rich.live import Live


class PytestScreen:
    """Output of one pytest process. Without a terminal reporter (`-p no:terminal`, xdist workers) nothing is said."""

    def __init__(self, config: pytest.Config, environ: Mapping[str, str] = os.environ) -> None:
        self._config = config
        self._environ = environ
        self._area: _Area | None = None

    def line(self, text: str, detail: bool = False) -> None:
        """Write a line that stays: details only under -v, nothing under -q."""
        reporter = self._reporter
        if reporter is None or reporter.verbosity < (1 if detail else 0):
            return
        self.erase()
        with self._uncaptured():
            reporter.ensure_newline()
            reporter.write_line(text)

    @property
    def live(self) -> bool:
        """True on a terminal that understands cursor movements and that nobody else writes to meanwhile."""
        reporter = self._reporter
        if reporter is None or reporter.verbosity < 0:
            return False
        dumb = self._environ.get("TERM", "dumb") == "dumb"
        logging_on = self._config.getini("log_cli") or self._config.getoption("log_cli_level", None)
        return bool(reporter.isatty) and not (dumb or logging_on or self._environ.get("CI"))

    def draw(self, renderable: RenderableType) -> None:
        """Show the area, or replace what it shows."""
        with self._uncaptured():
            if self._area is None:
                writer = self._reporter._tw
                self._area = _Area(writer._file, writer.width_of_current_line)
            self._area.show(renderable)

    def erase(self) -> None:
        """Take the area away; the cursor is then where pytest left it."""
        if self._area is not None:
            with self._uncaptured():
                self._area.close()
            self._area = None

    @property
    def _reporter(self) -> Any:
        return self._config.pluginmanager.get_plugin("terminalreporter")

    def _uncaptured(self) -> AbstractContextManager[None]:
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        return capture.global_and_fixture_disabled() if capture else nullcontext()


class _Area:
    """Some rows below pytest's current line."""

    def __init__(self, file: TextIO, column: int) -> None:
        self._file = file
        self._column = column
        self._console = Console(file=file, force_terminal=True, legacy_windows=False)
        self._console.size = os.get_terminal_size(file.fileno())  # rich would ask the captured descriptors
        if column:
            file.write("\n")
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def show(self, renderable: RenderableType) -> None:
        self._live.update(renderable, refresh=True)
        self._file.flush()

    def close(self) -> None:
        self._live.stop()
        if self._column:
            self._file.write(f"\x1b[1A\x1b[{self._column % self._console.width + 1}G")
        self._file.flush()
