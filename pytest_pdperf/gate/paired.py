"""Two topologies side by side: their ratio with an interval over launches, and what a suite may expect of
it.

`itl_ms_p99` of PD at least 5x lower than aggregated at 4096/128 is a claim about a ratio. It holds when the
whole confidence interval keeps it, it is violated when the whole interval breaks it, and otherwise the
launches cannot tell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean

from pydantic import Field, field_validator, model_validator

from pytest_pdperf.spec.document import read_document
from pytest_pdperf.spec.topology import Frozen
from pytest_pdperf.spec.validation import suggestion, validate

from .catalogue import Catalogue, spec_of
from .statistics import PRIOR_WEIGHT, log_score, sample_variance, t_quantile

INTERVAL = 0.95
"""Two-sided level of the interval."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """candidate / reference of one metric, in plain units: 0.2 is a fifth, whichever way is better."""

    value: float
    low: float
    high: float
    launches: tuple[int, int]
    """(candidate, reference)."""
    paired: bool

    def text(self) -> str:
        """`0.183x (0.171..0.197, 3+3 launches, unpaired)`."""
        how = "paired by session" if self.paired else "unpaired"
        a, b = self.launches
        return f"{self.value:.3g}x ({self.low:.3g}..{self.high:.3g}, {a}+{b} launches, {how})"


def compare(
    candidate: Sequence[float], reference: Sequence[float], prior_sd: float, *, paired: bool = False
) -> Ratio:
    """Ratio of geometric means over launches with its interval.

    One value a launch, finite and positive (else ValueError). `prior_sd` is the standard deviation of
    ln(value) between launches to assume; it weighs `PRIOR_WEIGHT` degrees of freedom, so that one launch
    each gives an interval too. `paired`: value i of both comes from one session, so what the machine did
    that night cancels.
    """
    if not candidate or not reference:
        raise ValueError("a ratio needs at least one launch of each topology")
    ours = [log_score(value, 1) for value in candidate]
    theirs = [log_score(value, 1) for value in reference]
    if paired:
        if len(ours) != len(theirs):
            raise ValueError(f"pairs need equal counts, got {len(ours)} and {len(theirs)}")
        differences = [a - b for a, b in zip(ours, theirs, strict=True)]
        freedom = len(differences) - 1
        prior = 2 * prior_sd**2
        variance = (PRIOR_WEIGHT * prior + freedom * sample_variance(differences)) / (PRIOR_WEIGHT + freedom)
        error = math.sqrt(variance / len(differences))
        center = fmean(differences)
    else:
        freedom = len(ours) + len(theirs) - 2
        squares = sample_variance(ours) * (len(ours) - 1) + sample_variance(theirs) * (len(theirs) - 1)
        variance = (PRIOR_WEIGHT * prior_sd**2 + squares) / (PRIOR_WEIGHT + freedom)
        error = math.sqrt(variance * (1 / len(ours) + 1 / len(theirs)))
        center = fmean(ours) - fmean(theirs)
    reach = t_quantile((1 + INTERVAL) / 2, PRIOR_WEIGHT + freedom) * error
    return Ratio(
        math.exp(center), math.exp(center - reach), math.exp(center + reach), (len(ours), len(theirs)), paired
    )


@dataclass(frozen=True, slots=True)
class Bounds:
    """The ratios that an expectation allows."""

    low: float
    high: float


_NUMBER = r"(?P<number>[0-9]+(?:\.[0-9]+)?)"
_FORMS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(rf"at least {_NUMBER}\s*x (?P<way>lower|higher)"), "at least"),
    (re.compile(rf"at most {_NUMBER}\s*x (?P<way>lower|higher)"), "at most"),
    (re.compile(rf"within {_NUMBER}\s*%"), "within"),
    (re.compile(r"(?P<way>lower|higher)"), "any"),
)
GRAMMAR = "'at least 5x lower', 'at most 1.3x higher', 'within 10 %', 'lower' or 'higher'"


def parse_bounds(text: str) -> Bounds:
    """Turn `at least 5x lower` into bounds on candidate / reference. Raises ValueError naming the forms it
    knows.
    """
    for pattern, kind in _FORMS:
        match = pattern.fullmatch(" ".join(text.split()))
        if match is None:
            continue
        groups = match.groupdict()
        number = float(groups.get("number") or 1.0)
        if kind == "within":
            if number <= 0:
                break
            return Bounds(1 / (1 + number / 100), 1 + number / 100)
        if number < 1 or (number == 1 and kind != "any"):
            break
        lower = groups["way"] == "lower"
        if kind == "at most":
            return Bounds(1 / number, math.inf) if lower else Bounds(0.0, number)
        return Bounds(0.0, 1 / number) if lower else Bounds(number, math.inf)
    raise ValueError(f"{text!r} is no expectation; write {GRAMMAR} (factors above 1)")


class Expectation(Frozen):
    """One claim about two topologies, as written in YAML."""

    candidate: str = Field(min_length=1)
    reference: str = Field(min_length=1)
    cell: str = Field(default="*", min_length=1)
    """Cell id or shell-style glob."""
    workload: str = Field(default="*", min_length=1)
    metric: str = Field(min_length=1)
    expect: str
    reason: str = ""

    @field_validator("expect")
    @classmethod
    def _parses(cls, text: str) -> str:
        parse_bounds(text)
        return text

    @model_validator(mode="after")
    def _two_topologies(self) -> Expectation:
        if self.candidate == self.reference:
            raise ValueError(f"reference: {self.reference!r} is the candidate itself")
        return self

    @property
    def bounds(self) -> Bounds:
        """Ratios that keep the claim."""
        return parse_bounds(self.expect)

    def applies(self, workload: str, cell: str) -> bool:
        """Whether the claim is about this cell."""
        return fnmatchcase(workload, self.workload) and fnmatchcase(cell, self.cell)

    def text(self) -> str:
        """`itl_ms_p99 of pd-1p2d at least 5x lower than aggregated-3x at in4096-out128-c16`."""
        verb = f"{self.expect} of" if self.expect.startswith("within") else f"{self.expect} than"
        return f"{self.metric} of {self.candidate} {verb} {self.reference} at {self.cell}"


class Expectations(Frozen):
    """A file of claims."""

    expectations: tuple[Expectation, ...]


def load_expectations(path: Path, catalogue: Catalogue) -> tuple[Expectation, ...]:
    """Read claims from YAML. Raises UsageProblem for a bad file and for a metric that no table knows."""
    document = read_document(path)
    loaded = validate(Expectations, document.data, document)
    for index, expectation in enumerate(loaded.expectations):
        if spec_of(expectation.metric, catalogue) is None:
            known = suggestion(expectation.metric, catalogue)
            raise document.problem(
                ("expectations", index, "metric"), f"{expectation.metric!r} is no metric{known}"
            )
    return loaded.expectations


class Standing(StrEnum):
    """How a claim stands after the launches there are."""

    HOLDS = "holds"
    VIOLATED = "violated"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Answer:
    """One claim, checked in one cell."""

    expectation: Expectation
    standing: Standing
    ratio: Ratio | None
    note: str = ""

    def line(self) -> str:
        """One readable line."""
        seen = self.ratio.text() if self.ratio is not None else self.note
        return f"{self.standing:<9} {self.expectation.text()}: {seen}"


def check(expectation: Expectation, ratio: Ratio | None, note: str = "not measured on both") -> Answer:
    """Hold a ratio's interval against a claim; without a ratio the claim is undecided."""
    if ratio is None:
        return Answer(expectation, Standing.UNDECIDED, None, note)
    bounds = expectation.bounds
    if bounds.low <= ratio.low and ratio.high <= bounds.high:
        standing = Standing.HOLDS
    elif ratio.high < bounds.low or ratio.low > bounds.high:
        standing = Standing.VIOLATED
    else:
        standing = Standing.UNDECIDED
    return Answer(expectation, standing, ratio)
