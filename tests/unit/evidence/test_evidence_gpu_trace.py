"""Slow because hot is told from slow because changed."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from pytest_pdperf.evidence.gpu_trace import (
    GpuSampler,
    Look,
    energy_per_token,
    judge_throttle,
    read_energy,
    read_smi_csv,
    summarise,
)
from pytest_pdperf.gpus.nvml import GpuSample

SAMPLES = Path(__file__).parents[4] / "shared" / "samples"
CAP = ("software power cap",)


def look(
    t: float, mhz: int | None = 1980, reasons: tuple[str, ...] | None = (), idle: bool | None = False
) -> Look:
    return Look(t, "GPU-0", mhz, 500.0, 60, reasons, idle)


THROTTLED = [
    look(0),
    look(1, 1600, CAP),
    look(2, 1610, CAP),
    look(3, 345, (), idle=True),
    look(4, None, None, idle=None),
]


def test_idle_and_silent_looks_are_not_busy() -> None:
    (found,) = summarise(THROTTLED)
    assert (found.looks, found.busy, found.throttled, found.reasons) == (5, 3, 2, CAP)
    assert found.throttled_share == pytest.approx(2 / 3)
    assert found.sm_mhz == 1610


def test_a_throttled_cell_is_inconclusive_against_a_cool_baseline_only() -> None:
    rows = summarise(THROTTLED)
    found = judge_throttle(rows)
    assert found.status == "inconclusive"
    assert "software power cap" in found.detail
    assert "share 0.67 in this run, baseline 0.0" in found.detail
    assert judge_throttle(rows, baseline_share=0.65).status == "clean"


def test_nothing_seen_is_unknown_never_clean() -> None:
    assert judge_throttle([]).status == "unknown"
    assert judge_throttle(summarise([look(0, idle=True)])).status == "unknown"
    both = summarise([look(0), Look(0, "GPU-1", None, None, None, None, None)])
    assert judge_throttle(both).status == "unknown"


def test_the_worst_gpu_decides_and_the_dark_one_is_named() -> None:
    cool = [Look(t, "GPU-1", 1980, 400.0, 50, (), False) for t in range(3)]
    found = judge_throttle(summarise([*cool, *THROTTLED]))
    assert (found.status, found.detail.split()[0]) == ("inconclusive", "GPU-0")
    dark = judge_throttle(summarise([*cool, Look(0, "GPU-9")]))
    assert dark.detail == "no busy sample of GPU-9"
    one = [look(t, 1980, CAP if t == 0 else ()) for t in range(20)]
    assert judge_throttle(summarise(one)).status == "clean"
    assert judge_throttle(summarise(one[:19])).status == "inconclusive"


def test_low_clocks_without_a_reason_are_pointed_out() -> None:
    rows = summarise([look(t, 1600) for t in range(4)])
    assert judge_throttle(rows, baseline_mhz=1980.0).detail == "clocks off: 1600 MHz, baseline 1980 MHz"
    assert judge_throttle(rows, baseline_mhz=1600.0).status == "clean"
    mixed = summarise([look(0, 1600), Look(0, "GPU-1", 1980, 400.0, 50, (), False)])
    assert judge_throttle(mixed, baseline_mhz=1980.0).status == "inconclusive"
    assert judge_throttle(rows).status == "clean"


def test_energy_comes_from_the_counter_or_from_power_over_time() -> None:
    counted = [Look(t, "GPU-0", power_w=1.0, energy_j=e) for t, e in ((0, 1000.0), (1, 1400.0), (2, 2000.0))]
    (row,) = summarise(counted)
    assert row.energy_j == 1000.0
    reset = [Look(t, "GPU-0", power_w=2.0, energy_j=e) for t, e in ((0, 1000.0), (3, 5.0))]
    assert summarise(reset)[0].energy_j == 6.0
    (integrated,) = summarise([Look(t, "GPU-0", power_w=w) for t, w in ((0, 100.0), (1, 300.0), (3, 300.0))])
    assert integrated.energy_j == 800.0
    (single,) = summarise([Look(0, "GPU-0", power_w=1.0)])
    assert single.energy_j is None
    assert energy_per_token([row, integrated], 900) == 2.0
    assert energy_per_token([row, single], 900) is None
    assert energy_per_token([row], 0) is None
    assert energy_per_token([], 10) is None


@pytest.mark.parametrize("header", ["clocks_throttle_reasons.active", "clocks_event_reasons.active"])
def test_both_header_names_of_nvidia_smi(header: str) -> None:
    lines = [
        f"timestamp, index, clocks.current.sm [MHz], power.draw [W], temperature.gpu, {header}",
        "2026/02/03 04:05:06.000, 0, 1980 MHz, 520.10 W, 55, 0x0000000000000000",
        "2026/02/03 04:05:07.000, 0, 1600 MHz, 699.80 W, 71, 0x0000000000000004",
        "2026/02/03 04:05:07.500, 0, 1610 MHz, 699.80 W, 71, 0x0000000000000004",
        "2026/02/03 04:05:08.000, 0, 345 MHz, 80.00 W, 45, 0x0000000000000001",
        "2026/02/03 04:05:09.000, 0, [N/A], [N/A], [N/A], [N/A]",
        "half a li",
    ]
    found = read_smi_csv(lines)
    assert found.bad_lines == ("half a li",)
    (row,) = summarise(found.looks)
    assert (row.looks, row.busy, row.throttled, row.reasons) == (5, 3, 2, CAP)
    assert row.temperature_c == 71
    assert judge_throttle([row]).status == "inconclusive"


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the shared samples are not beside this repository")
@pytest.mark.parametrize("name", ["nvidia_smi_throttle.csv", "nvidia_smi_throttle_newer_driver.csv"])
def test_field_samples(name: str) -> None:
    found = read_smi_csv((SAMPLES / name).read_text().splitlines())
    (row,) = summarise(found.looks)
    assert (row.busy, row.throttled, found.bad_lines) == (2, 1, ())


def sample(uuid: str) -> GpuSample:
    return GpuSample(uuid, 1, 1980, (), False, 50, 400.0, ())


def test_sampler_looks_until_it_is_left_and_survives_a_failing_driver() -> None:
    seen, enough = [0], threading.Event()

    def read() -> Iterable[GpuSample]:
        seen[0] += 1
        if seen[0] == 2:
            raise RuntimeError("driver is gone for a moment")
        if seen[0] >= 4:
            enough.set()
        return [sample("GPU-0"), sample("GPU-1")]

    times = iter(range(10_000))
    with GpuSampler(
        ("GPU-0", "GPU-1"),
        period_s=0.001,
        read=read,
        energy=lambda: {"GPU-0": 5.0},
        clock=lambda: float(next(times)),
    ) as sampler:
        assert enough.wait(20)
    assert sampler.failures == 1
    assert len(sampler.looks) == 2 * (seen[0] - 1)
    assert {row.uuid: row.energy_j for row in sampler.looks} == {"GPU-0": 5.0, "GPU-1": None}
    assert all(thread.name != "gpu-sampler" for thread in threading.enumerate())


class FakeNvml:
    """One GPU counts energy, one does not."""

    class NVMLError(Exception):
        """As in the binding."""

    broken = False

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken:
            raise self.NVMLError("no driver")

    def nvmlShutdown(self) -> None:  # noqa: N802
        """Nothing to do."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        if handle != "GPU-0":
            raise self.NVMLError("not supported")
        return 2500


def test_energy_counters_are_millijoules() -> None:
    nvml = FakeNvml()
    assert read_energy(("GPU-0", "GPU-1"), nvml) == {"GPU-0": 2.5}
    nvml.broken = True
    assert read_energy(("GPU-0",), nvml) == {}
