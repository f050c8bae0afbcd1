"""Whoever comes onto a leased GPU during a cell is named; the stack's own processes never are."""

from __future__ import annotations

import os
from collections.abc import Collection

from pytest_pdperf.gpus.foreign import ForeignUse
from pytest_pdperf.gpus.grammar import Device, DeviceKind
from pytest_pdperf.gpus.nvml import GpuSample, read_samples
from tests.unit.gpus.fake_nvml import FakeGpu, FakeNvml

A, B = "GPU-aaaa", "GPU-bbbb"
DEVICES = (Device("0", DeviceKind.GPU, A, 0), Device("1", DeviceKind.GPU, B, 1))


class Bench:
    """Two leased GPUs and a third that is not; the stack's own pids are 10 and 11."""

    def __init__(self, *there: tuple[int, int | None]) -> None:
        self.gpus = [FakeGpu(A, "01", processes=list(there)), FakeGpu(B, "02"), FakeGpu("GPU-c", "03")]
        self.own = {10, 11}
        self.now = 0.0
        self.looks = 0
        self.watch = ForeignUse(
            DEVICES, lambda: self.own, read=self.read, period_s=1.0, clock=lambda: self.now
        )

    def read(self, uuids: Collection[str]) -> tuple[GpuSample, ...]:
        self.looks += 1
        return read_samples(uuids, FakeNvml(self.gpus), lambda pid: f"program {pid}")

    def look(self) -> tuple[str, ...]:
        self.now += 1.0
        self.watch.look()
        return self.watch.reasons()


def test_a_newcomer_is_named_once_a_cell() -> None:
    bench = Bench((10, 8000))
    assert bench.look() == ()
    bench.gpus[1].processes.append((99, 512))
    bench.watch.look()
    bench.now += 1.0
    bench.watch.look()
    bench.now += 1.0
    bench.gpus[1].processes.clear()
    assert bench.look() == ("GPU 1 was used by another process meanwhile, pid 99 (512 MiB): program 99",)
    assert bench.look() == ()


def test_a_newcomer_that_stays_spoils_the_next_cell_too() -> None:
    bench = Bench((10, 8000))
    bench.gpus[0].processes.append((99, None))
    assert len(bench.look()) == 1
    assert len(bench.look()) == 1


def test_the_stacks_own_late_children_and_this_process_are_no_strangers() -> None:
    bench = Bench((10, 8000))
    bench.gpus[0].processes += [(11, 100), (os.getpid(), 20)]
    assert bench.look() == ()


def test_a_stranger_that_came_during_the_bring_up_is_named() -> None:
    assert len(Bench((10, 8000), (99, 512)).look()) == 1


def test_pids_of_another_namespace_count_only_when_they_come_later() -> None:
    bench = Bench((500_010, 8000), (500_011, 8000))
    assert bench.look() == ()
    bench.gpus[0].processes.append((500_099, 100))
    assert len(bench.look()) == 1


def test_other_gpus_are_nobodys_business_and_the_driver_is_asked_once_a_period() -> None:
    bench = Bench()
    bench.gpus[2].processes.append((99, 1))
    for _ in range(5):
        bench.now += 0.3
        bench.watch.look()
    assert bench.watch.reasons() == ()
    assert bench.looks == 1 + 2


def test_without_whole_gpus_nobody_asks() -> None:
    slices = (Device("x", DeviceKind.MIG, "MIG-1", 0), Device("cpu", DeviceKind.CPU))

    def refuse(uuids: Collection[str]) -> tuple[GpuSample, ...]:
        raise AssertionError("asked")

    watch = ForeignUse(slices, set, read=refuse)
    watch.look()
    assert watch.reasons() == ()
