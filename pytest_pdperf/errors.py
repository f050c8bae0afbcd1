"""Errors that a user can act on; everything else is a bug and keeps its traceback."""

from collections.abc import Sequence


class UsageProblem(Exception):
    """Bad input, found before anything starts: one or two lines that name the place, the value and the way out.

    The pytest layer turns it into `pytest.UsageError`, the command line into exit status 2.
    """


class BringUpError(Exception):
    """A stack did not come up: `reason` is one line, `detail` the log tail of the process to blame."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}\n{detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class RoleDied(Exception):
    """A process of the stack ended during a cell: names the role, the exit code or signal and the log tail."""

    def __init__(self, instance: str, reason: str, detail: str = "") -> None:
        super().__init__(f"{instance}: {reason}\n{detail}" if detail else f"{instance}: {reason}")
        self.instance = instance
        self.reason = reason
        self.detail = detail


class TearDownError(Exception):
    """A stack that was taken down left something behind: one line each for a process or a GPU that is not empty."""

    def __init__(self, stack: str, lines: Sequence[str]) -> None:
        super().__init__("\n".join([f"{stack}: tear-down left something behind", *lines]))
        self.lines = tuple(lines)


class CannotKeep(Exception):
    """The disk takes no more: what was to be written where, what of the run is kept, and the way out, a line each."""


class CannotCompare(Exception):
    """A comparison that needs two ways to ask has one only: the reason, for a skipped test."""
