"""How well the simulator's timing model reproduces the published H100 table, cell by cell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pytest_pdperf.engines.sim.cluster import Deployment, simulate
from pytest_pdperf.engines.sim.profile import H100_QWEN3_32B, Profile
from pytest_pdperf.engines.sim.traffic import RequestTimes, Traffic
from pytest_pdperf.spec.topology import Kind

PUBLISHED = Path(__file__).parents[2] / "baselines" / "published" / "h100-qwen3-32b.json"
COLUMNS = {
    "ttft_ms_p50": "ttft_p50",
    "ttft_ms_p95": "ttft_p95",
    "tpot_ms_p50": "tpot_p50",
    "itl_ms_p99": "itl_p99",
    "output_tps_wall": "output_throughput",
}
METRICS = tuple(COLUMNS.values())
_SHAPE = re.compile(r"in(\d+)-out(\d+)-c(\d+)")
SEEDS = range(5)

THINK_S = 0.03322641533155178
"""Pause of the published runs' client between two requests (fitted)."""
START_SPREAD_S = 0.005276834406270001
"""Spread of its first sends (fitted)."""
LENGTH_SIGMA = 0.01
STRAGGLER = ("aggregated", 256, 1024, 16)
"""The published throughput of this cell is that of one 30 s straggler: no target for a fit."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the published table; milliseconds and tokens per second."""

    topology: str
    input_tokens: int
    output_tokens: int
    concurrency: int
    published: Mapping[str, float]

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Topology, input tokens, output tokens, concurrency."""
        return self.topology, self.input_tokens, self.output_tokens, self.concurrency

    @property
    def requests(self) -> int:
        """Requests simulated: as published, but fewer at concurrency 1, where all are alike."""
        return {1: 6, 16: 64}.get(self.concurrency, 32)


def read_cells(path: Path = PUBLISHED) -> list[Cell]:
    """The published table."""
    rows = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [
        Cell(
            row["topology"],
            *_shape(row["cell"]),
            published={
                ours: row["metrics"][name] for name, ours in COLUMNS.items() if name in row["metrics"]
            },
        )
        for row in rows
    ]


def _shape(cell: str) -> tuple[int, int, int]:
    found = _SHAPE.fullmatch(cell)
    if found is None:
        raise ValueError(f"{cell!r} is no cell of the published table")
    tokens_in, tokens_out, clients = map(int, found.groups())
    return tokens_in, tokens_out, clients


def run_cell(cell: Cell, seed: int, profile: Profile = H100_QWEN3_32B) -> list[RequestTimes]:
    """One simulated run of a cell with the published runs' clients and router."""
    if cell.topology == "aggregated":
        deployment = Deployment(Kind.AGGREGATED, policy="herd")
    else:
        deployment = Deployment(Kind.PD, transport=cell.topology.removeprefix("pd-"), policy="herd")
    traffic = Traffic(
        input_tokens=(cell.input_tokens, cell.input_tokens),
        output_tokens=cell.output_tokens,
        requests=cell.requests,
        concurrency=cell.concurrency,
        think_s=THINK_S,
        start_spread_s=START_SPREAD_S,
        length_sigma=LENGTH_SIGMA,
    )
    return simulate(profile, deployment, [traffic], seed=seed)


def statistics(times: Sequence[RequestTimes]) -> dict[str, float]:
    """The published table's statistics of one run, in its units."""
    ttft = np.array([r.ttft_s for r in times]) * 1e3
    gaps = np.concatenate([np.diff(r.token_s) for r in times]) * 1e3
    return {
        "ttft_p50": float(np.median(ttft)),
        "ttft_p95": float(np.percentile(ttft, 95)),
        "tpot_p50": float(np.median([r.tpot_s for r in times])) * 1e3,
        "itl_p99": float(np.percentile(gaps, 99)),
        "output_throughput": sum(r.output_tokens for r in times) / max(r.token_s[-1] for r in times),
    }


def model(cell: Cell, seeds: Iterable[int] = SEEDS, profile: Profile = H100_QWEN3_32B) -> dict[str, float]:
    """Mean over seeds of each run's statistics."""
    runs = [statistics(run_cell(cell, seed, profile)) for seed in seeds]
    return {name: float(np.mean([run[name] for run in runs])) for name in METRICS}


def errors(cell: Cell, modelled: Mapping[str, float]) -> dict[str, float]:
    """model / published - 1 of every metric that is published and fit to compare."""
    return {
        name: modelled[name] / value - 1.0
        for name, value in cell.published.items()
        if not (name == "output_throughput" and cell.key == STRAGGLER)
    }
