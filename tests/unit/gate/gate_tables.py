"""A small metric table and builders, so that the gate's tests do not depend on the real table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pytest_pdperf.gate.baseline import CellBaseline, Launch, Pin
from pytest_pdperf.gate.catalogue import MetricSpec
from pytest_pdperf.gate.fingerprint import BaselineKey, CellRef
from pytest_pdperf.gate.judge import Measurement, Sample, judge_cell
from pytest_pdperf.gate.statistics import Pooled
from pytest_pdperf.gate.verdict import CellVerdict

START = datetime(2025, 3, 1, 2, 0, tzinfo=UTC)


@dataclass(frozen=True)
class Spec:
    """Stands for measure.table.Metric."""

    id: str
    unit: str
    direction: int
    tau: float
    floor: float = 0.0
    min_n: int = 1
    gated: bool = True
    prior_sd: float = 0.015


@dataclass(frozen=True)
class Tolerance:
    """Stands for spec.tolerances.Tolerance."""

    tau: float
    floor: float


CATALOGUE: dict[str, Spec] = {
    spec.id: spec
    for spec in (
        Spec("ttft_ms_p50", "ms", 1, 0.10, floor=1.0, prior_sd=0.03),
        Spec("ttft_ms_p95", "ms", 1, 0.20, floor=1.0, min_n=59, prior_sd=0.08),
        Spec("tpot_ms_p50", "ms", 1, 0.05, floor=0.2),
        Spec("output_tps", "tok/s", -1, 0.05),
        Spec("output_tps_wall", "tok/s", -1, 0.05, gated=False),
    )
}

KEY = BaselineKey(
    gpu="NVIDIA H100 80GB HBM3",
    gpu_count=6,
    link="nvlink/tcp",
    engine="vllm",
    model="Qwen/Qwen3-32B",
    dtype="bfloat16",
    topology="pd-1p2d-tp2",
    topology_digest="t0",
    definitions="1",
    simulated=False,
)
REF = CellRef("fixed-shapes", "in512-out256-c16", "w0")


def tolerance_of(metric: str, spec: MetricSpec) -> Tolerance:
    """The table's own tolerances."""
    return Tolerance(spec.tau or 0.0, spec.floor)


def launch(
    values: Mapping[str, float], *, day: float = 0, id: str = "", n: int = 64, session: str = ""
) -> Launch:
    """One launch, `day` days after the start."""
    return Launch(
        id=id or f"run-{day}",
        date=START + timedelta(days=day),
        values=dict(values),
        n=dict.fromkeys(values, n),
        session=session,
        engine_version="0.33.0",
    )


def baseline(
    series: Mapping[str, Sequence[float]], ref: CellRef = REF, key: BaselineKey = KEY
) -> CellBaseline:
    """A baseline with one launch a day."""
    count = len(next(iter(series.values())))
    launches = tuple(
        launch({name: values[day] for name, values in series.items()}, day=day) for day in range(count)
    )
    pin = Pin(key=key.digest, workload_digest=ref.digest, reason="test", launches=launches)
    return CellBaseline(ref, pin.signed(key))


def measured(
    values: Mapping[str, float | None], *, n: int = 64, requests: int = 64, ok: int = 64
) -> Measurement:
    """A valid measurement with these values."""
    return Measurement(
        {name: Sample(value, n if value is not None else 0) for name, value in values.items()}, requests, ok
    )


def judged(
    values: Mapping[str, float | None] | Measurement,
    stored: CellBaseline | None,
    siblings: Mapping[str, Pooled] | None = None,
) -> CellVerdict:
    """Judge with the small table."""
    taken = values if isinstance(values, Measurement) else measured(values)
    return judge_cell(taken, stored, siblings or {}, tolerance_of, CATALOGUE)
