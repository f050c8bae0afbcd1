"""A hot GPU is not a regression: sample clocks, power and throttling beside a cell and judge the samples."""

from __future__ import annotations

import csv
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from pytest_pdperf.gpus.nvml import GpuSample, read_samples, reason_names

THROTTLE_LIMIT = 0.05
"""Share of busy samples that may be throttled beyond the baseline's share."""
CLOCK_SLACK = 0.03
"""SM clocks may be this much below those of the baseline without a word."""


@dataclass(frozen=True, slots=True)
class Look:
    """One GPU at one moment. `t` is in seconds on the sampler's clock; None means that the driver does not say."""

    t: float
    uuid: str
    sm_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    idle: bool | None = None
    energy_j: float | None = None
    """The driver's running energy count since boot."""


@dataclass(frozen=True, slots=True)
class GpuSummary:
    """One GPU over a cell. Shares and clocks are over busy looks only; None where nothing was seen."""

    uuid: str
    looks: int
    busy: int
    throttled: int
    reasons: tuple[str, ...]
    throttled_share: float | None
    sm_mhz: float | None
    """Median while busy."""
    power_w: float | None
    """Mean over all looks."""
    temperature_c: int | None
    """Highest."""
    energy_j: float | None
    """From the driver's counter, else power integrated over time."""


def summarise(looks: Iterable[Look]) -> tuple[GpuSummary, ...]:
    """One summary a GPU, in order of first appearance. Idle looks and looks without an answer are not busy."""
    rows = list(looks)
    return tuple(
        _summary(uuid, [row for row in rows if row.uuid == uuid])
        for uuid in dict.fromkeys(r.uuid for r in rows)
    )


def _summary(uuid: str, rows: Sequence[Look]) -> GpuSummary:
    busy = [row for row in rows if row.idle is False and row.throttle_reasons is not None]
    hot = [row for row in busy if row.throttle_reasons]
    clocks = [row.sm_mhz for row in busy if row.sm_mhz is not None]
    power = [row.power_w for row in rows if row.power_w is not None]
    return GpuSummary(
        uuid=uuid,
        looks=len(rows),
        busy=len(busy),
        throttled=len(hot),
        reasons=tuple(sorted({reason for row in hot for reason in row.throttle_reasons or ()})),
        throttled_share=len(hot) / len(busy) if busy else None,
        sm_mhz=statistics.median(clocks) if clocks else None,
        power_w=statistics.fmean(power) if power else None,
        temperature_c=max((row.temperature_c for row in rows if row.temperature_c is not None), default=None),
        energy_j=_energy(rows),
    )


def _energy(rows: Sequence[Look]) -> float | None:
    counted = [row.energy_j for row in rows if row.energy_j is not None]
    if len(counted) >= 2 and counted[-1] >= counted[0]:
        return counted[-1] - counted[0]
    known = [(row.t, row.power_w) for row in rows if row.power_w is not None]
    if len(known) < 2:
        return None
    return sum((b - a) * (p + q) / 2 for (a, p), (b, q) in pairwise(known))


def energy_per_token(summaries: Iterable[GpuSummary], output_tokens: int) -> float | None:
    """Joules of all GPUs for one output token; None when any GPU's energy or the token count is not known."""
    rows = list(summaries)
    if not rows or output_tokens <= 0 or any(row.energy_j is None for row in rows):
        return None
    return sum(row.energy_j or 0.0 for row in rows) / output_tokens


@dataclass(frozen=True, slots=True)
class ThrottleVerdict:
    """`inconclusive` is neither pass nor fail: the GPU, not the software, may have changed. Never empty."""

    status: Literal["clean", "inconclusive", "unknown"]
    detail: str


def judge_throttle(
    now: Iterable[GpuSummary],
    *,
    baseline_share: float = 0.0,
    baseline_mhz: float | None = None,
    limit: float = THROTTLE_LIMIT,
) -> ThrottleVerdict:
    """Judge the worst GPU of a cell against the baseline's throttled share and clocks."""
    rows = list(now)
    known = [row for row in rows if row.throttled_share is not None]
    if not rows or len(known) != len(rows):
        dark = [row.uuid for row in rows if row.throttled_share is None]
        return ThrottleVerdict(
            "unknown", f"no busy sample of {', '.join(dark)}" if dark else "no GPU was sampled"
        )
    worst = max(known, key=lambda row: row.throttled_share or 0.0)
    share = worst.throttled_share or 0.0
    if share > baseline_share + limit:
        words = ", ".join(worst.reasons)
        return ThrottleVerdict(
            "inconclusive",
            f"{worst.uuid} throttled ({words}): share {share:.2f} in this run, baseline {baseline_share:.1f}",
        )
    slow = min((row.sm_mhz for row in known if row.sm_mhz is not None), default=None)
    if baseline_mhz and slow is not None and slow < baseline_mhz * (1 - CLOCK_SLACK):
        return ThrottleVerdict("inconclusive", f"clocks off: {slow:.0f} MHz, baseline {baseline_mhz:.0f} MHz")
    return ThrottleVerdict("clean", f"throttled share {share:.2f}")


class GpuSampler:
    """Looks at some GPUs every `period_s` seconds in a thread of its own until stopped. A context manager.

    `read` and `energy` ask the driver; both are injected in tests. A read that fails is counted in `failures` and
    never ends the thread.
    """

    def __init__(
        self,
        uuids: Sequence[str],
        *,
        period_s: float = 0.5,
        read: Callable[[], Iterable[GpuSample]] | None = None,
        energy: Callable[[], Mapping[str, float]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.uuids = tuple(uuids)
        self.failures = 0
        self._period_s = period_s
        self._read = read or (lambda: read_samples(self.uuids))
        self._energy = energy or (lambda: read_energy(self.uuids) if read is None else {})
        self._clock = clock
        self._looks: list[Look] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def looks(self) -> tuple[Look, ...]:
        """All looks so far."""
        return tuple(self._looks)

    def look(self) -> None:
        """Take one look now."""
        t = self._clock()
        try:
            samples, joules = list(self._read()), self._energy()
        except Exception:  # a driver that fails must not end the measurement
            self.failures += 1
            return
        self._looks += [
            Look(
                t,
                s.uuid,
                s.sm_mhz,
                s.power_w,
                s.temperature_c,
                s.throttle_reasons,
                s.idle,
                joules.get(s.uuid),
            )
            for s in samples
        ]

    def __enter__(self) -> GpuSampler:
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.look()

    def _run(self) -> None:
        while True:
            self.look()
            if self._stop.wait(self._period_s):
                return


def read_energy(uuids: Iterable[str], nvml: Any = None) -> dict[str, float]:
    """Joules that each GPU used since its driver was loaded; GPUs that do not count are left out."""
    if nvml is None:
        from pytest_pdperf.gpus.nvml import load_nvml

        nvml = load_nvml()
    found: dict[str, float] = {}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return found
    try:
        for uuid in uuids:
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                found[uuid] = nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000.0
            except (nvml.NVMLError, AttributeError):
                continue
    finally:
        nvml.nvmlShutdown()
    return found


@dataclass(frozen=True, slots=True)
class SmiCsv:
    """Looks read from an `nvidia-smi --query-gpu ... --format=csv` file, with the lines that made no sense."""

    looks: tuple[Look, ...]
    bad_lines: tuple[str, ...] = field(default_factory=tuple)


_REASON_HEADERS = ("clocks_throttle_reasons.active", "clocks_event_reasons.active")


def read_smi_csv(lines: Iterable[str]) -> SmiCsv:
    """Read such a file; drivers renamed throttle reasons to event reasons, both headers are taken.

    `t` is the row number: the file's stamps are local time without a zone. `[N/A]` is None.
    """
    rows = csv.reader(lines, skipinitialspace=True)
    header = next(rows, [])
    names = [name.partition(" [")[0].strip() for name in header]
    looks: list[Look] = []
    bad: list[str] = []
    for number, row in enumerate(rows):
        if len(row) != len(names):
            bad.append(", ".join(row))
            continue
        cells = dict(zip(names, (cell.strip() for cell in row), strict=True))
        bits = next((_bits(cells[name]) for name in _REASON_HEADERS if name in cells), None)
        clock, heat = _number(cells.get("clocks.current.sm")), _number(cells.get("temperature.gpu"))
        looks.append(
            Look(
                t=float(number),
                uuid=cells.get("uuid") or cells.get("index") or "?",
                sm_mhz=None if clock is None else int(clock),
                power_w=_number(cells.get("power.draw")),
                temperature_c=None if heat is None else int(heat),
                throttle_reasons=None if bits is None else reason_names(bits),
                idle=None if bits is None else bool(bits & 1),
            )
        )
    return SmiCsv(tuple(looks), tuple(bad))


def _bits(text: str) -> int | None:
    try:
        return int(text, 16)
    except ValueError:
        return None


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").split()[0])
    except (ValueError, IndexError):
        return None
