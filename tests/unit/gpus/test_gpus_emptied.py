"""After tear-down a GPU is empty, or the answer says which is not and who holds it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from pytest_pdperf.gpus.emptied import memory_in_use, wait_emptied
from pytest_pdperf.gpus.grammar import Device, DeviceKind
from pytest_pdperf.gpus.inventory import Inventory
from pytest_pdperf.gpus.nvml import GpuSample, read_inventory, read_samples
from tests.unit.gpus.fake_nvml import FakeGpu, FakeNvml

A, B = "GPU-aaaa", "GPU-bbbb"


class Driver:
    """A fake driver whose GPUs give memory back a step at a time, one step a look."""

    def __init__(self, *gpus: FakeGpu, frees: int = 0) -> None:
        self.nvml = FakeNvml(list(gpus))
        self.frees = frees
        self.now = 0.0
        self.looks = 0

    def read(self, uuids: Collection[str]) -> tuple[GpuSample, ...]:
        self.looks += 1
        found = read_samples(uuids, self.nvml, lambda pid: f"program {pid}")
        for gpu in self.nvml.gpus:
            gpu.used_mib = max(3, gpu.used_mib - self.frees)
        return found

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, before: dict[str, int], timeout_s: float = 30.0) -> tuple[str, ...]:
        return wait_emptied(
            before, read=self.read, timeout_s=timeout_s, clock=lambda: self.now, sleep=self.sleep
        )


def test_memory_that_is_freed_late_is_waited_for() -> None:
    driver = Driver(FakeGpu(A, "01", used_mib=60_000), frees=10_000)
    assert driver.wait({A: 3}) == ()
    assert driver.looks == 7
    assert 0 < driver.now < 30


def test_memory_that_stays_names_the_gpu_and_the_pids() -> None:
    stuck = FakeGpu(A, "01", used_mib=9000, processes=[(4242, 8900), (77, None)])
    driver = Driver(stuck, FakeGpu(B, "02", used_mib=3))
    (line,) = driver.wait({A: 3, B: 3}, timeout_s=5.0)
    assert line.startswith(f"{A}: 9000 MiB in use, 3 MiB before the launch, ")
    assert "pid 4242 (8900 MiB) program 4242, pid 77 program 77" in line
    assert line.endswith("5 s after tear-down")
    assert driver.now == pytest.approx(5.0, abs=0.3)


def test_memory_of_a_hidden_process_is_said_to_be_so() -> None:
    (line,) = Driver(FakeGpu(A, "01", used_mib=9000)).wait({A: 3}, timeout_s=1.0)
    assert "held by no process that can be seen from here" in line


@pytest.mark.parametrize(("used", "full"), [(1000 + 256, False), (1000 + 257, True)])
def test_what_was_in_use_before_may_be_in_use_after(used: int, full: bool) -> None:
    driver = Driver(FakeGpu(A, "01", used_mib=used))
    assert bool(driver.wait({A: 1000}, timeout_s=1.0)) is full


def test_a_gpu_that_answers_no_more_is_not_called_empty() -> None:
    gone = Driver(FakeGpu(B, "02"))
    (line,) = gone.wait({A: 3}, timeout_s=1.0)
    assert line.startswith(f"{A}: the driver does not say how much memory is in use")
    silent = Driver(FakeGpu(A, "01"))
    silent.nvml.refuses = {"nvmlDeviceGetMemoryInfo"}
    assert len(silent.wait({A: 3}, timeout_s=1.0)) == 1


def test_without_gpus_nobody_asks_a_driver() -> None:
    driver = Driver()
    assert driver.wait({}) == ()
    assert driver.looks == 0


def test_memory_before_is_that_of_whole_gpus_whose_driver_says_it(
    inventory: Callable[[str], Inventory],
) -> None:
    found = read_inventory(FakeNvml([FakeGpu(A, "01", used_mib=500), FakeGpu(B, "02")]), lambda pid: "")
    devices = [Device("0", DeviceKind.GPU, A, 0), Device("cpu", DeviceKind.CPU)]
    assert memory_in_use(devices, found) == {A: 500}
    dark = read_inventory(FakeNvml([FakeGpu(A, "01")], refuses={"nvmlDeviceGetMemoryInfo"}), lambda pid: "")
    assert memory_in_use(devices, dark) == {}
    cut = inventory("mig-h100-2x")
    part = next(mig for gpu in cut.gpus for mig in gpu.mig_devices)
    assert memory_in_use([Device("x", DeviceKind.MIG, part.uuid, 0)], cut) == {}
