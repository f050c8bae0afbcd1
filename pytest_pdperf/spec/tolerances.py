"""How much slower is too much: exceptions to the metric table, by metric, workload, cell and topology."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pydantic import Field, model_validator

from .topology import Frozen

_SELECTORS = ("metric", "workload", "cell", "topology")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """`tau` is relative (0.05 = 5 %), `floor` absolute in the metric's unit: smaller changes never count."""

    tau: float
    floor: float


class Override(Frozen):
    """One exception. Selectors are shell-style globs; one left out matches everything."""

    metric: str = Field(default="*", min_length=1)
    workload: str = Field(default="*", min_length=1)
    cell: str = Field(default="*", min_length=1)
    topology: str = Field(default="*", min_length=1)
    tau: float | None = Field(default=None, gt=0, le=2)
    floor: float | None = Field(default=None, ge=0, le=1e9)
    reason: str = ""

    @model_validator(mode="after")
    def _says_something(self) -> Override:
        if self.tau is None and self.floor is None:
            raise ValueError("an override needs tau (relative), floor (absolute) or both")
        return self

    def matches(self, metric: str, workload: str, cell: str, topology: str) -> bool:
        """True when every selector accepts its name."""
        names = (metric, workload, cell, topology)
        return all(fnmatchcase(n, getattr(self, s)) for s, n in zip(_SELECTORS, names, strict=True))

    @property
    def specificity(self) -> int:
        """2 for each selector that names one thing, 1 for each real glob, 0 for `*`."""
        patterns = [getattr(self, selector) for selector in _SELECTORS]
        return sum(0 if p == "*" else 1 if _is_glob(p) else 2 for p in patterns)


class Tolerances(Frozen):
    """All exceptions of a tolerances file, in the order of the file."""

    overrides: tuple[Override, ...] = ()

    def for_(
        self, metric: str, workload: str, cell: str, topology: str, tau: float, floor: float
    ) -> Tolerance:
        """The metric table's defaults `tau` and `floor` with the exceptions that apply.

        The most specific override wins, the later one among equals; tau and floor are decided separately.
        """
        for override in sorted(self.overrides, key=lambda o: o.specificity):
            if override.matches(metric, workload, cell, topology):
                tau = tau if override.tau is None else override.tau
                floor = floor if override.floor is None else override.floor
        return Tolerance(tau, floor)

    def dead_metrics(self, known: Collection[str]) -> tuple[str, ...]:
        """Metric selectors that match none of `known`: misspelt ones, which would silently do nothing."""
        patterns = dict.fromkeys(override.metric for override in self.overrides)
        return tuple(p for p in patterns if not any(fnmatchcase(name, p) for name in known))


def _is_glob(pattern: str) -> bool:
    return any(character in pattern for character in "*?[")
