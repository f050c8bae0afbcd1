"""Virtual nights: what a performance suite measures when nothing changed, or when one thing did.

A score is x = s*ln(y), + is worse. It is the sum of effects that act on different things:

* night: every series of a session (temperature, clocks, a neighbour on the host)
* launch: every series of one bring-up (placement, memory layout), and again every series of one cell of it
* run: one series of one run
* straggler: rarely, one cell of one launch has a request that waits; tails and throughput suffer

Defaults of `run` are what launches of real engines spread by (`python -m benchmarks.gate.noise` prints it), at
concurrency 1, 4, 8 and 16. Launch effects common to all series were too small to be seen; nights apart and stragglers
were not measured, so those are assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pytest_pdperf.measure.table import METRICS

Scores = npt.NDArray[np.float64]
"""Last axis: series (cell-major), first axis: nights."""

CELLS = 16
METRIC_IDS = ("ttft_ms_p50", "ttft_ms_p95", "tpot_ms_p50", "itl_ms_p99", "e2e_ms_p50", "output_tps")
SERIES = CELLS * len(METRIC_IDS)

CONCURRENCY = (1, 4, 8, 16)
"""Of the cells, in turn: cells 0..3 are the first shape."""

RUN_SD = {
    "ttft_ms_p50": (0.02, 0.07, 0.13, 0.12),
    "ttft_ms_p95": (0.03, 0.03, 0.03, 0.03),
    "tpot_ms_p50": (0.001, 0.001, 0.004, 0.003),
    "itl_ms_p99": (0.02, 0.01, 0.025, 0.03),
    "e2e_ms_p50": (0.002, 0.006, 0.009, 0.010),
    "output_tps": (0.003, 0.003, 0.004, 0.004),
}
"""Standard deviation of ln(value) from launch to launch, by concurrency, as observed."""

ASSUMED_SD = {
    "ttft_ms_p50": 0.02,
    "ttft_ms_p95": 0.05,
    "tpot_ms_p50": 0.004,
    "itl_ms_p99": 0.025,
    "e2e_ms_p50": 0.006,
    "output_tps": 0.006,
}
"""The order of magnitude of repeated runs of 64 requests: what was assumed before anything was measured."""
STRAGGLER = {"ttft_ms_p95": 0.30, "itl_ms_p99": 0.20, "output_tps": 0.03}


def tolerances() -> Scores:
    """ln(1+tau) of every series, from the metric table. Absolute floors are left out: they can only hide
    small changes.
    """
    taus = [METRICS[name].tau or 0.0 for name in METRIC_IDS]
    return np.tile(np.log1p(taus), CELLS)


@dataclass(frozen=True)
class Noise:
    """The knobs, as standard deviations of ln(value) unless said otherwise."""

    night: float = 0.02
    launch: float = 0.001
    launch_cell: float = 0.001
    run: float = 1.0
    """Factor on the run noise."""
    stragglers: float = 0.005
    """Chance of one in a cell of a launch."""
    observed: float = 1.0
    """1 takes the run noise from RUN_SD, 0 from ASSUMED_SD."""


@dataclass(frozen=True)
class Change:
    """A true change of one metric in the first `cells` cells. `effect` is a score difference."""

    metric: str
    effect: float
    cells: int

    def scores(self) -> Scores:
        """The change of every series."""
        table = np.zeros((CELLS, len(METRIC_IDS)))
        table[: self.cells, METRIC_IDS.index(self.metric)] = self.effect
        return table.reshape(SERIES)

    @property
    def affected(self) -> npt.NDArray[np.bool_]:
        """Which series truly changed."""
        changed: npt.NDArray[np.bool_] = self.scores() != 0
        return changed


NOTHING = Change(METRIC_IDS[0], 0.0, 0)


@dataclass(frozen=True)
class Session:
    """One night: `candidate[:, 0]` is stage 1, later ones are fresh launches; `reference` are launches of
    the old build.
    """

    candidate: Scores
    reference: Scores


@dataclass(frozen=True)
class Nights:
    """Baselines and the sessions held against them. Shapes: (nights, launches, SERIES)."""

    baseline: Scores
    """The first two launches are of one session, each later one of a night of its own."""
    sessions: tuple[Session, ...]


class Generator:
    """Draws nights."""

    def __init__(self, seed: int, noise: Noise) -> None:
        self._random = np.random.default_rng(seed)
        self._noise = noise
        by_level = np.array([RUN_SD[name] for name in METRIC_IDS]).T
        assumed = np.array([ASSUMED_SD[name] for name in METRIC_IDS])
        level = noise.observed * by_level + (1 - noise.observed) * assumed
        self._run = np.tile(level, (CELLS // len(CONCURRENCY), 1)) * noise.run
        self._straggler = np.array([STRAGGLER.get(name, 0.0) for name in METRIC_IDS])

    def draw(
        self,
        nights: int,
        change: Change = NOTHING,
        *,
        slow_host: float = 0.0,
        launches: int = 11,
        sessions: int = 1,
        fresh: int = 3,
    ) -> Nights:
        """`slow_host` (score) slows the whole session, reference and candidate alike. `fresh` launches
        follow stage 1.
        """
        drift = self._normal(self._noise.night, (nights, launches - 1, 1, 1))
        baseline = self._launches(nights, launches) + np.concatenate([drift[:, :1], drift], axis=1)
        held = []
        for _ in range(sessions):
            tonight = self._normal(self._noise.night, (nights, 1, 1, 1)) + slow_host
            candidate = self._launches(nights, 1 + fresh) + tonight
            reference = self._launches(nights, 2) + tonight
            held.append(Session(_flat(candidate) + change.scores(), _flat(reference)))
        return Nights(_flat(baseline), tuple(held))

    def _normal(self, sd: float, shape: tuple[int, ...]) -> Scores:
        return self._random.normal(0.0, sd, shape)

    def _launches(self, nights: int, count: int) -> Scores:
        per_cell = (nights, count, CELLS, 1)
        per_series = (nights, count, CELLS, len(METRIC_IDS))
        waits = self._random.random(per_cell) < self._noise.stragglers
        size = self._random.lognormal(0.0, 0.5, per_cell)
        scores: Scores = (
            self._normal(self._noise.launch, (nights, count, 1, 1))
            + self._normal(self._noise.launch_cell, per_cell)
            + self._random.standard_normal(per_series) * self._run
            + waits * size * self._straggler
        )
        return scores


def _flat(scores: Scores) -> Scores:
    return scores.reshape(scores.shape[0], scores.shape[1], SERIES)


if __name__ == "__main__":
    from .observed import main

    raise SystemExit(main())
