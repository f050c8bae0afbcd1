"""Reading a machine: what NVML says, what it refuses to say, and what recorded machines hold."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.gpus.busy import HIDDEN_MIB, busy_reasons, check_idle
from pytest_pdperf.gpus.grammar import Device, DeviceKind, parse_gpus, resolve
from pytest_pdperf.gpus.inventory import LINKS, Gpu, Inventory, describe, load_recorded
from pytest_pdperf.gpus.nvml import Nvml, command_line, read_inventory, read_samples, reason_names
from tests.unit.gpus.fake_nvml import FakeGpu, FakeNvml

Recorded = Callable[[str], Inventory]
INVENTORIES = sorted((Path(__file__).parents[2] / "data" / "inventories").glob("*.json"))


def nvml(gpus: list[FakeGpu], refuses: set[str] | None = None, old: bool = False) -> FakeNvml:
    return FakeNvml(gpus, refuses, old)


def read(fake: FakeNvml) -> Inventory:
    found: Nvml = fake
    return read_inventory(found, command_of=lambda pid: f"command {pid}")


def pair() -> list[FakeGpu]:
    return [FakeGpu("GPU-a", "00000000:1b:00.0"), FakeGpu("GPU-b", "00000000:9d:00.0", node=1)]


@pytest.mark.parametrize("old", [False, True])
def test_everything_that_nvml_says(old: bool) -> None:
    gpus = pair()
    gpus[0].processes = [(17, 500), (18, None)]
    gpus[0].reasons = 0x1 | 0x4 | 0x40
    fake = nvml(gpus, old=old)
    found = read(fake)
    assert fake.open == 0, "the driver is let go"
    assert (found.driver, found.cuda, found.problem) == ("570.133.20", "12.8", "")
    first, second = found.gpus
    assert (first.index, first.uuid, first.name) == (0, "GPU-a", "NVIDIA H100 80GB HBM3")
    assert (first.memory_mib, first.used_mib) == (81559, 603 if old else 3)
    assert (first.numa_node, second.numa_node) == (0, 1)
    assert (first.cpus, second.cpus) == ("0-1,3,64-65", "2,4-5,64-65")
    assert first.pci_bus == "00000000:1b:00.0"
    assert first.links == ("X", "SYS")
    assert (first.ecc_enabled, first.ecc_uncorrected) == (True, 2)
    assert (first.sm_mhz, first.sm_max_mhz, first.memory_mhz, first.memory_max_mhz) == (345, 1980, 2619, 2619)
    assert first.throttle_reasons == ("software power cap", "hardware thermal slowdown")
    assert second.throttle_reasons == ()
    assert [(p.pid, p.used_mib, p.command) for p in first.processes] == [
        (17, 500, "command 17"),
        (18, None, "command 18"),
    ]


def test_nvlink_through_a_switch_counts_every_link() -> None:
    gpus = pair()
    for gpu in gpus:
        gpu.nvlinks = dict.fromkeys(range(4), "switch")
    found = read(nvml(gpus))
    assert found.gpus[0].links == ("X", "NV4")
    assert found.islands() == {"GPU-a": 0, "GPU-b": 0}


def test_direct_nvlink_counts_the_links_between_two() -> None:
    gpus = [*pair(), FakeGpu("GPU-c", "00000000:c3:00.0", node=1)]
    gpus[0].nvlinks = {0: gpus[1].bus, 1: gpus[1].bus, 2: gpus[2].bus}
    gpus[1].nvlinks = {0: gpus[0].bus, 1: gpus[0].bus}
    gpus[2].nvlinks = {3: gpus[0].bus}
    links = [gpu.links for gpu in read(nvml(gpus)).gpus]
    assert links == [("X", "NV2", "NV1"), ("NV2", "X", "NODE"), ("NV1", "NODE", "X")]


def test_mig_slices() -> None:
    gpus = pair()
    gpus[0].mig = True
    gpus[0].slices = [
        ("MIG-1", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", 1),
        ("MIG-2", "NVIDIA H100 MIG 1g.10gb", 9),
    ]
    first, second = read(nvml(gpus)).gpus
    assert first.mig_enabled
    assert [(m.uuid, m.profile, m.gpu_instance, m.compute_instance) for m in first.mig_devices] == [
        ("MIG-1", "3g.40gb", 1, 0),
        ("MIG-2", "1g.10gb", 9, 0),
    ]
    assert not second.mig_enabled
    assert second.mig_devices == ()


OPTIONAL = [
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetCudaDriverVersion",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetMemoryAffinity",
    "nvmlDeviceGetCpuAffinityWithinScope",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetP2PStatus",
    "nvmlDeviceGetTopologyCommonAncestor",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetComputeRunningProcesses",
]


@pytest.mark.parametrize("name", OPTIONAL)
def test_one_refused_question_leaves_the_rest(name: str) -> None:
    found = read(nvml(pair(), {name}))
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-a", "GPU-b"]


def test_what_is_not_said_is_none_and_never_zero() -> None:
    first = read(nvml(pair(), set(OPTIONAL))).gpus[0]
    unknown = (
        "used_mib",
        "numa_node",
        "ecc_enabled",
        "ecc_uncorrected",
        "sm_mhz",
        "sm_max_mhz",
        "throttle_reasons",
    )
    assert {name: getattr(first, name) for name in unknown} == dict.fromkeys(unknown)
    assert first.links == ("X", "?")
    assert first.name == "unknown"


@pytest.mark.parametrize(
    ("refuses", "message"),
    [
        ("nvmlInit", "no working NVIDIA driver (nvmlInit: Not Supported)"),
        ("nvmlDeviceGetCount", "the NVIDIA driver stopped answering"),
        ("nvmlDeviceGetUUID", "the NVIDIA driver stopped answering"),
    ],
)
def test_a_machine_without_a_driver_is_an_answer(refuses: str, message: str) -> None:
    found = read(nvml(pair(), {refuses}))
    assert found.gpus == ()
    assert message in found.problem


def test_a_driver_without_gpus() -> None:
    assert read(nvml([])).problem == "the NVIDIA driver finds no GPU"


def test_samples_go_by_uuid_and_leave_out_what_is_gone() -> None:
    gpus = pair()
    gpus[1].reasons, gpus[1].used_mib, gpus[1].processes = 0x4, 4000, [(5, 4000)]
    fake: Nvml = nvml(gpus)
    (sample,) = read_samples(["GPU-b", "GPU-gone"], fake, command_of=str)
    assert (sample.uuid, sample.used_mib, sample.sm_mhz, sample.idle) == ("GPU-b", 4000, 345, False)
    assert sample.throttle_reasons == ("software power cap",)
    assert (sample.temperature_c, sample.power_w) == (41, 70.5)
    assert [p.pid for p in sample.processes] == [5]
    gpus[1].reasons = 0x1
    assert [(s.idle, s.throttle_reasons) for s in read_samples(["GPU-b"], fake)] == [(True, ())]
    broken: Nvml = nvml(gpus, {"nvmlInit"})
    assert read_samples(["GPU-b"], broken) == ()


def test_reasons_by_bit() -> None:
    assert reason_names(0) == ()
    assert reason_names(0x1) == (), "idling slows nothing"
    assert reason_names(0x8 | 0x20) == ("hardware slowdown", "software thermal slowdown")
    assert reason_names(0x4000) == ("reason 0x4000",)


def test_command_line_of_a_process() -> None:
    assert "python" in command_line(os.getpid()) or "pytest" in command_line(os.getpid())
    assert command_line(2**22 + 5) == ""


@pytest.mark.parametrize("path", INVENTORIES, ids=lambda p: p.stem)
def test_recorded_machines_are_whole(path: Path) -> None:
    found = load_recorded(path)
    assert found.origin, "says whether it was read or written by hand"
    assert bool(found.gpus) != bool(found.problem)
    assert Inventory.model_validate_json(found.model_dump_json()) == found
    for place, gpu in enumerate(found.gpus):
        assert gpu.index == place
        assert len(gpu.links) == len(found.gpus)
        assert gpu.links[place] == "X"
        assert all(link in LINKS or link.removeprefix("NV").isdigit() for link in gpu.links)
        for other_place, other in enumerate(found.gpus):
            assert gpu.links[other_place] == other.links[place] == found.link(gpu, other)
    uuids = [gpu.uuid for gpu in found.gpus] + [mig.uuid for gpu in found.gpus for mig in gpu.mig_devices]
    assert len(set(uuids)) == len(uuids)


def test_islands_of_recorded_machines(inventory: Recorded) -> None:
    assert set(inventory("hgx-h100-8x").islands().values()) == {0}
    assert inventory("pcie-l40s-4x").islands() == {}
    assert list(inventory("pcie-a100-bridged-4x").islands().values()) == [0, 0, 1, 1]
    box = inventory("pcie-a100-bridged-4x")
    assert box.islands()[box.gpus[0].uuid] == box.islands()[box.gpus[2].uuid]


def test_a_path_that_nobody_recorded_is_unknown(inventory: Recorded) -> None:
    box, stranger = inventory("hgx-h100-8x"), inventory("hgx-h200-8x").gpus[0]
    assert box.link(box.gpus[0], stranger) == "?"
    assert box.link(box.gpus[0], box.gpus[7]) == "NV18"


def test_an_island_is_joined_pair_by_pair() -> None:
    """Two quads with single links between them, as in boxes without a switch: a path is not an island."""

    def link(i: int, j: int) -> str:
        return "X" if i == j else "NV2" if i // 4 == j // 4 else "NV1" if i % 4 == j % 4 else "SYS"

    gpus = (
        Gpu(index=i, uuid=f"{i}", name="a", memory_mib=1, links=tuple(link(i, j) for j in range(8)))
        for i in range(8)
    )
    assert Inventory(gpus=tuple(gpus)).islands() == {f"{i}": i // 4 for i in range(8)}


def test_a_gpu_is_found_by_its_slice(inventory: Recorded) -> None:
    box = inventory("mig-h100-2x")
    assert box.gpu(box.gpus[0].mig_devices[1].uuid) == box.gpus[0]
    assert box.gpu("GPU-nowhere") is None


def test_bad_recordings(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(UsageProblem, match=r"x\.json: cannot be read"):
        load_recorded(path)
    path.write_text('{"gpus": [{"index": -1, "uuid": "x", "name": "y", "memory_mib": 1}]}')
    with pytest.raises(UsageProblem, match=r"x\.json: not a recorded inventory: gpus\.0\.index"):
        load_recorded(path)
    path.write_text("{")
    with pytest.raises(UsageProblem, match="not a recorded inventory"):
        load_recorded(path)


def test_description(inventory: Recorded) -> None:
    assert describe(inventory("hgx-h100-8x").gpus) == "8 x NVIDIA H100 80GB HBM3"
    assert describe(()) == "no GPU"
    a, b = (Gpu(index=i, uuid=f"{i}", name=n, memory_mib=1) for i, n in enumerate("ab"))
    assert describe((a, b, a)) == "2 x a + 1 x b"


def test_busy_gpus_are_named_with_their_users(inventory: Recorded) -> None:
    box = inventory("pcie-l40s-4x-busy")
    devices = resolve(parse_gpus("all"), box, None)
    visible, hidden = busy_reasons(devices, box)
    assert visible == "GPU 1 is in use by process 4242 (41240 MiB): python train.py --epochs 3"
    assert hidden == "GPU 2 has 30100 MiB in use by a process that cannot be seen from here"
    assert busy_reasons(devices, box, own_pids={4242}) == [hidden]
    check_idle(devices[:1], box)
    with pytest.raises(UsageProblem, match="GPU 1 is in use by process 4242"):
        check_idle(devices, box)


def test_a_little_memory_without_a_process_is_the_drivers_own(inventory: Recorded) -> None:
    gpu = Gpu(index=0, uuid="GPU-a", name="x", memory_mib=80000, used_mib=HIDDEN_MIB - 1)
    device = Device("0", DeviceKind.GPU, "GPU-a", 0)
    assert busy_reasons([device], Inventory(gpus=(gpu,))) == []
    assert busy_reasons([device], Inventory(gpus=(gpu.model_copy(update={"used_mib": HIDDEN_MIB}),)))
    assert busy_reasons([Device("cpu", DeviceKind.CPU)], Inventory(gpus=(gpu,))) == []


def test_importing_the_room_does_not_touch_nvml() -> None:
    code = (
        "import sys, pytest_pdperf.gpus.placement, pytest_pdperf.gpus.nvml, pytest_pdperf.gpus.lease;"
        "sys.exit('pynvml' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=60).returncode == 0
    )
