"""A driver without hardware: answers like NVML, and refuses what a test tells it to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

MIB = 1 << 20


class FakeError(Exception):
    """Stands for pynvml.NVMLError."""


@dataclass
class FakeGpu:
    """State of one GPU; `nvlinks` maps link number -> PCI bus of the other end, or `switch`."""

    uuid: str
    bus: str
    name: Any = "NVIDIA H100 80GB HBM3"
    node: int = 0
    used_mib: int = 3
    reasons: int = 0
    nvlinks: dict[int, str] = field(default_factory=dict)
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    slices: list[tuple[str, str, int]] = field(default_factory=list)
    mig: bool = False


class FakeNvml:
    """Implements what `pytest_pdperf.gpus.nvml.Nvml` asks for; names in `refuses` raise."""

    NVMLError: type[Exception] = FakeError
    NVML_NVLINK_MAX_LINKS = 4
    nvmlMemory_v2 = 2  # noqa: N815

    def __init__(self, gpus: list[FakeGpu], refuses: set[str] | None = None, old: bool = False) -> None:
        self.gpus, self.refuses, self.old = gpus, refuses or set(), old
        self.open = 0

    def __getattribute__(self, name: str) -> Any:
        if (
            name.startswith("nvml")
            and name[4:5].isupper()
            and name in object.__getattribute__(self, "refuses")
        ):
            return self._refuse(name)
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)

    @staticmethod
    def _refuse(name: str) -> Callable[..., Any]:
        def refuse(*_: object) -> Any:
            raise FakeError(f"{name}: Not Supported")

        return refuse

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> Any:  # noqa: N802
        return b"570.133.20" if self.old else "570.133.20"

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        return 12080

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:  # noqa: N802
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise FakeError("Not Found")

    def nvmlDeviceGetUUID(self, handle: Any) -> Any:  # noqa: N802
        uuid = handle[0] if isinstance(handle, tuple) else handle.uuid
        return uuid.encode() if self.old else uuid

    def nvmlDeviceGetName(self, handle: Any) -> Any:  # noqa: N802
        return handle[1] if isinstance(handle, tuple) else handle.name

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:  # noqa: N802
        reserve = 0 if version == self.nvmlMemory_v2 else 600
        if version is not None and self.old:
            raise FakeError("Function Not Found")
        used = 0 if isinstance(handle, tuple) else handle.used_mib
        return SimpleNamespace(total=81559 * MIB, used=(used + reserve) * MIB)

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> list[int]:  # noqa: N802
        return [int(handle.mig), int(handle.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, index: int) -> Any:  # noqa: N802
        if index >= len(handle.slices):
            raise FakeError("Not Found")
        return handle.slices[index]

    def nvmlDeviceGetGpuInstanceId(self, handle: Any) -> int:  # noqa: N802
        return int(handle[2])

    def nvmlDeviceGetComputeInstanceId(self, handle: Any) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetEccMode(self, handle: FakeGpu) -> list[int]:  # noqa: N802
        return [1, 1]

    def nvmlDeviceGetTotalEccErrors(self, handle: FakeGpu, kind: int, counter: int) -> int:  # noqa: N802
        return {(1, 0): 2, (0, 0): 99}.get((kind, counter), -1)

    def nvmlDeviceGetMemoryAffinity(self, handle: FakeGpu, words: int, scope: int) -> list[int]:  # noqa: N802
        return [1 << handle.node] + [0] * (words - 1)

    def nvmlDeviceGetCpuAffinityWithinScope(self, handle: FakeGpu, words: int, scope: int) -> list[int]:  # noqa: N802
        return [0b1011 if handle.node == 0 else 0b110100, 0b11] + [0] * (words - 2)

    def nvmlDeviceGetPciInfo(self, handle: FakeGpu) -> Any:  # noqa: N802
        return SimpleNamespace(busId=handle.bus.encode() if self.old else handle.bus)

    def nvmlDeviceGetP2PStatus(self, first: FakeGpu, second: FakeGpu, index: int) -> int:  # noqa: N802
        joined = second.bus in first.nvlinks.values() or "switch" in first.nvlinks.values()
        return 0 if index == 2 and joined else 5

    def nvmlDeviceGetNvLinkState(self, handle: FakeGpu, link: int) -> int:  # noqa: N802
        return int(link in handle.nvlinks)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: FakeGpu, link: int) -> int:  # noqa: N802
        return 2 if handle.nvlinks[link] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: FakeGpu, link: int) -> Any:  # noqa: N802
        return SimpleNamespace(busId=handle.nvlinks[link].upper())

    def nvmlDeviceGetTopologyCommonAncestor(self, first: FakeGpu, second: FakeGpu) -> int:  # noqa: N802
        return 40 if first.node == second.node else 50

    def nvmlDeviceGetClockInfo(self, handle: FakeGpu, kind: int) -> int:  # noqa: N802
        return {1: 345, 2: 2619}[kind]

    def nvmlDeviceGetMaxClockInfo(self, handle: FakeGpu, kind: int) -> int:  # noqa: N802
        return {1: 1980, 2: 2619}[kind]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: FakeGpu) -> int:  # noqa: N802
        if self.old:
            raise AttributeError("nvmlDeviceGetCurrentClocksEventReasons")
        return handle.reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: FakeGpu) -> int:  # noqa: N802
        return handle.reasons

    def nvmlDeviceGetTemperature(self, handle: FakeGpu, sensor: int) -> int:  # noqa: N802
        return 41

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:  # noqa: N802
        return 70_500

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeGpu) -> list[Any]:  # noqa: N802
        return [
            SimpleNamespace(pid=p, usedGpuMemory=None if u is None else u * MIB) for p, u in handle.processes
        ]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: FakeGpu) -> list[Any]:  # noqa: N802
        return []
