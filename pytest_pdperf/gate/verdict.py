"""Every verdict that the gate can give, what it means and what it does to the session: one table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from .statistics import Binding


class Verdict(StrEnum):
    """The gate's answer for one metric or one cell."""

    PASS = "PASS"
    IMPROVED = "IMPROVED"
    NOISY = "NOISY"
    SUSPECT = "SUSPECT"
    NO_BASELINE = "NO_BASELINE"
    INCONCLUSIVE = "INCONCLUSIVE"
    FAIL = "FAIL"
    INVALID = "INVALID"


class Blocks(StrEnum):
    """When a verdict turns its test item red."""

    NEVER = "never"
    REQUIRED = "with --require-baseline"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class VerdictMeaning:
    """One row of the table: what a verdict says and what it costs."""

    meaning: str
    blocks: Blocks
    exit_status: int
    """Exit status of a session whose worst verdict this is, where it blocks."""
    rank: int
    """A cell takes the verdict of highest rank among its metrics."""


VERDICTS: dict[Verdict, VerdictMeaning] = {
    Verdict.IMPROVED: VerdictMeaning(
        "better than the baseline by more than the limit; reported, never accepted by itself",
        Blocks.NEVER,
        0,
        1,
    ),
    Verdict.PASS: VerdictMeaning(
        "within the limit, and the limit is tight enough to say so", Blocks.NEVER, 0, 0
    ),
    Verdict.NOISY: VerdictMeaning(
        "within the limit, but noise widens it to over twice the tolerance: proves nothing",
        Blocks.NEVER,
        0,
        2,
    ),
    Verdict.NO_BASELINE: VerdictMeaning(
        "nothing comparable is stored, so nothing was compared", Blocks.REQUIRED, 1, 3
    ),
    Verdict.INCONCLUSIVE: VerdictMeaning(
        "the surroundings differ from the baseline's (clocks, load): neither pass nor fail",
        Blocks.ALWAYS,
        1,
        4,
    ),
    Verdict.SUSPECT: VerdictMeaning(
        "worse than the limit in one launch and not confirmed by fresh launches", Blocks.ALWAYS, 1, 5
    ),
    Verdict.FAIL: VerdictMeaning(
        "worse than the tolerance, confirmed by fresh launches (or requests failed)", Blocks.ALWAYS, 1, 6
    ),
    Verdict.INVALID: VerdictMeaning(
        "the measurement or its baseline cannot be trusted, so no performance is read from it",
        Blocks.ALWAYS,
        1,
        7,
    ),
}


def blocks(verdict: Verdict, require_baseline: bool) -> bool:
    """Whether an item with this verdict is red."""
    when = VERDICTS[verdict].blocks
    return when is Blocks.ALWAYS or (when is Blocks.REQUIRED and require_baseline)


def worst(verdicts: list[Verdict]) -> Verdict:
    """The verdict of a cell from those of its metrics. Of none it is INVALID: an empty comparison proves
    nothing.
    """
    return max(verdicts, key=lambda v: VERDICTS[v].rank, default=Verdict.INVALID)


def number(value: float) -> str:
    """Four significant digits without an exponent for ordinary sizes, thousands separated."""
    if not math.isfinite(value):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3e}"
    digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{digits}f}"


@dataclass(frozen=True, slots=True)
class VerdictRow:
    """One metric of one cell held against its baseline: the message of a failing item and a row of every
    report.

    `change`, `limit` and `detectable` are relative and signed so that + is worse: 0.10 is 10 % slower, or
    10 % less throughput.
    """

    metric: str
    verdict: Verdict
    unit: str = ""
    direction: int = 1
    value: float | None = None
    baseline: float | None = None
    change: float | None = None
    limit: float | None = None
    binding: Binding | None = None
    n: int = 0
    """Samples behind `value` (requests or gaps)."""
    launches: int = 0
    """B: launches in the baseline."""
    provisional: bool = False
    """B < 5: the limit leans on borrowed or shipped variance."""
    detectable: float | None = None
    """Smallest change that this cell would have flagged four times in five."""
    suspicious: bool = False
    """Faster by more than three tolerances: did the work shrink?"""
    stage: int = 1
    p: float | None = None
    """Holm-adjusted p-value of stage 2."""
    note: str = ""

    def line(self) -> str:
        """One readable line, with units: what was seen, what was allowed, which term binds and what could
        be seen at all.
        """
        parts = [f"{self.verdict:<8} {self.metric}"]
        unit = f" {self.unit}" if self.unit else ""
        if self.value is not None:
            seen = f"{number(self.value)}{unit}"
            parts.append(f"{seen} vs {number(self.baseline)}{unit}" if self.baseline is not None else seen)
        if self.change is not None:
            parts.append(self._change())
        if self.limit is not None:
            parts.append(f"limit {self.limit:.1%}" + (f" ({self.binding})" if self.binding else ""))
        if self.value is not None:
            parts.append(f"n={self.n}" + (f", B={self.launches}" if self.launches else ""))
        if self.p is not None:
            parts.append(f"stage {self.stage}, p={self.p:.2g}")
        if self.detectable is not None:
            parts.append(f"detects {self.detectable:.1%}")
        if self.provisional:
            parts.append(f"provisional (B={self.launches})")
        if self.note:
            parts.append(self.note)
        return " | ".join(parts)

    def _change(self) -> str:
        assert self.change is not None
        shown = self.change * self.direction
        word = "worse" if self.change > 0 else "better" if self.change < 0 else "same"
        return f"{shown:+.1%} ({word})"


@dataclass(frozen=True, slots=True)
class CellVerdict:
    """The verdict of one cell: its rows and the one of highest rank among them."""

    rows: tuple[VerdictRow, ...]
    verdict: Verdict

    @property
    def blocking(self) -> tuple[VerdictRow, ...]:
        """Rows that turn the item red whatever the options, worst first."""
        red = [row for row in self.rows if VERDICTS[row.verdict].blocks is Blocks.ALWAYS]
        return tuple(sorted(red, key=lambda row: -VERDICTS[row.verdict].rank))

    @property
    def suspects(self) -> tuple[VerdictRow, ...]:
        """Rows that stage 2 has to confirm or clear."""
        return tuple(row for row in self.rows if row.verdict is Verdict.SUSPECT)

    def lines(self) -> list[str]:
        """One line a row, worst first."""
        return [row.line() for row in sorted(self.rows, key=lambda row: -VERDICTS[row.verdict].rank)]
