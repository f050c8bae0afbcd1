"""The only code that talks to NVML: everything else works on inventories and samples that come from here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import psutil

from .cores import core_list
from .inventory import Gpu, GpuProcess, Inventory, MigDevice

MIB = 1 << 20
IDLE_REASON = 0x1
REASONS = {
    0x2: "application clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
}
"""Bits of NVML's clock event reasons (nvml.h, nvmlClocksEventReason*). 0x1 is idling and no throttle."""
_ANCESTORS = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t of two GPUs of different boards."""
_P2P_NVLINK, _P2P_OK = 2, 0
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_LINK_TO_SWITCH = 2
_SCOPE_NODE = 0
_UNCORRECTED, _VOLATILE = 1, 0

T = TypeVar("T")


class Nvml(Protocol):
    """The part of the `pynvml` module that is used here; calls fail with its `NVMLError`."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlSystemGetDriverVersion(self) -> Any: ...  # noqa: N802
    def nvmlSystemGetCudaDriverVersion(self) -> int: ...  # noqa: N802
    def nvmlDeviceGetCount(self) -> int: ...  # noqa: N802
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...  # noqa: N802
    def nvmlDeviceGetUUID(self, handle: Any) -> Any: ...  # noqa: N802

    def __getattr__(self, name: str) -> Callable[..., Any]: ...


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One look at one GPU while it works. None means that the driver does not say."""

    uuid: str
    used_mib: int | None
    sm_mhz: int | None
    throttle_reasons: tuple[str, ...] | None
    idle: bool | None
    temperature_c: int | None
    power_w: float | None
    processes: tuple[GpuProcess, ...]


def load_nvml() -> Nvml:
    """The real NVML binding, imported only when somebody asks for GPUs."""
    import pynvml

    return cast("Nvml", pynvml)


def read_inventory(nvml: Nvml | None = None, command_of: Callable[[int], str] | None = None) -> Inventory:
    """GPUs, wiring and users of this machine.

    Never raises for a machine without a driver: the answer then has no GPUs and says why in `problem`.
    `command_of` turns a pid into a command line.
    """
    nvml = nvml or load_nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Inventory(origin="NVML", problem=f"no working NVIDIA driver ({error})")
    try:
        return _Reader(nvml, command_of or command_line).inventory()
    except nvml.NVMLError as error:
        return Inventory(origin="NVML", problem=f"the NVIDIA driver stopped answering: {error}")
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def read_samples(
    uuids: Collection[str], nvml: Nvml | None = None, command_of: Callable[[int], str] | None = None
) -> tuple[GpuSample, ...]:
    """Memory, clocks, throttling and processes of some GPUs now; a GPU that does not answer is left out."""
    nvml = nvml or load_nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        reader = _Reader(nvml, command_of or command_line)
        found = []
        for uuid in uuids:
            handle = reader.ask("nvmlDeviceGetHandleByUUID", uuid)
            if handle is not None:
                found.append(reader.sample(uuid, handle))
        return tuple(found)
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def reason_names(bits: int) -> tuple[str, ...]:
    """Names of the clock event reasons that slow a GPU; an unknown bit keeps its number."""
    names = [name for bit, name in REASONS.items() if bits & bit]
    rest = bits & ~(IDLE_REASON | sum(REASONS))
    return tuple(names + ([f"reason {rest:#x}"] if rest else []))


def command_line(pid: int) -> str:
    """Command line of a process, empty when it is gone or hidden."""
    try:
        return " ".join(psutil.Process(pid).cmdline())[:200]
    except (psutil.Error, OSError):
        return ""


class _Reader:
    """Asks one question at a time: what a driver or a virtual GPU does not answer stays None."""

    def __init__(self, nvml: Nvml, command_of: Callable[[int], str]) -> None:
        self.nvml, self.command_of = nvml, command_of

    def ask(self, function: str, *args: object) -> Any:
        try:
            return getattr(self.nvml, function)(*args)
        except (self.nvml.NVMLError, AttributeError):
            return None

    def inventory(self) -> Inventory:
        handles = [self.nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self.nvml.nvmlDeviceGetCount())]
        cuda = self.ask("nvmlSystemGetCudaDriverVersion")
        return Inventory(
            origin="NVML",
            driver=_text(self.ask("nvmlSystemGetDriverVersion")),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            gpus=tuple(self.gpu(index, handle, handles) for index, handle in enumerate(handles)),
            problem="" if handles else "the NVIDIA driver finds no GPU",
        )

    def gpu(self, index: int, handle: Any, handles: list[Any]) -> Gpu:
        total, used = self.memory(handle)
        mode, ecc = self.ask("nvmlDeviceGetMigMode", handle), self.ask("nvmlDeviceGetEccMode", handle)
        mig_enabled = bool(mode and mode[0])
        return Gpu(
            index=index,
            uuid=_text(self.nvml.nvmlDeviceGetUUID(handle)),
            name=_text(self.ask("nvmlDeviceGetName", handle)) or "unknown",
            memory_mib=total or 0,
            used_mib=used,
            numa_node=self.numa_node(handle),
            cpus=_cpu_list(
                self.ask("nvmlDeviceGetCpuAffinityWithinScope", handle, _cpu_words(), _SCOPE_NODE)
            ),
            pci_bus=self.pci_bus(handle),
            links=tuple(self.link(handle, other, index == i) for i, other in enumerate(handles)),
            mig_enabled=mig_enabled,
            mig_devices=self.mig_devices(handle) if mig_enabled else (),
            ecc_enabled=bool(ecc[0]) if ecc else None,
            ecc_uncorrected=self.ask("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE),
            sm_mhz=self.ask("nvmlDeviceGetClockInfo", handle, _CLOCK_SM),
            sm_max_mhz=self.ask("nvmlDeviceGetMaxClockInfo", handle, _CLOCK_SM),
            memory_mhz=self.ask("nvmlDeviceGetClockInfo", handle, _CLOCK_MEMORY),
            memory_max_mhz=self.ask("nvmlDeviceGetMaxClockInfo", handle, _CLOCK_MEMORY),
            throttle_reasons=_names(self.reasons(handle)),
            processes=self.processes(handle),
        )

    def sample(self, uuid: str, handle: Any) -> GpuSample:
        bits, power = self.reasons(handle), self.ask("nvmlDeviceGetPowerUsage", handle)
        return GpuSample(
            uuid=uuid,
            used_mib=self.memory(handle)[1],
            sm_mhz=self.ask("nvmlDeviceGetClockInfo", handle, _CLOCK_SM),
            throttle_reasons=_names(bits),
            idle=None if bits is None else bool(bits & IDLE_REASON),
            temperature_c=self.ask("nvmlDeviceGetTemperature", handle, 0),
            power_w=None if power is None else power / 1000,
            processes=self.processes(handle),
        )

    def memory(self, handle: Any) -> tuple[int | None, int | None]:
        """Total and used MiB; version 2 leaves the driver's own reserve out of `used`."""
        version = getattr(self.nvml, "nvmlMemory_v2", None)
        info = self.ask("nvmlDeviceGetMemoryInfo", handle, version) if version is not None else None
        info = info or self.ask("nvmlDeviceGetMemoryInfo", handle)
        return (info.total // MIB, info.used // MIB) if info else (None, None)

    def reasons(self, handle: Any) -> int | None:
        """Drivers renamed throttle reasons to event reasons; old bindings know only the old name."""
        bits = self.ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if bits is None:
            bits = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return None if bits is None else int(bits)

    def numa_node(self, handle: Any) -> int | None:
        words = self.ask("nvmlDeviceGetMemoryAffinity", handle, 4, _SCOPE_NODE)
        nodes = (
            []
            if words is None
            else [w * 64 + b for w, word in enumerate(words) for b in range(64) if word >> b & 1]
        )
        return nodes[0] if len(nodes) == 1 else None

    def pci_bus(self, handle: Any) -> str:
        info = self.ask("nvmlDeviceGetPciInfo", handle)
        return _text(info.busId).lower() if info else ""

    def link(self, first: Any, second: Any, same: bool) -> str:
        if same:
            return "X"
        if self.ask("nvmlDeviceGetP2PStatus", first, second, _P2P_NVLINK) == _P2P_OK:
            count = self.nvlinks(first, self.pci_bus(second))
            return f"NV{count}" if count else "NV"
        ancestor = self.ask("nvmlDeviceGetTopologyCommonAncestor", first, second)
        return _ANCESTORS.get(ancestor, "PIX" if ancestor == 0 else "?")

    def nvlinks(self, handle: Any, other_bus: str) -> int:
        """Active links from one GPU to another: all of them through a switch, else those that end there."""
        count = 0
        for number in range(getattr(self.nvml, "NVML_NVLINK_MAX_LINKS", 18)):
            if not self.ask("nvmlDeviceGetNvLinkState", handle, number):
                continue
            to_switch = self.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, number) == _LINK_TO_SWITCH
            remote = None if to_switch else self.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, number)
            count += to_switch or (remote is not None and _text(remote.busId).lower() == other_bus)
        return count

    def mig_devices(self, handle: Any) -> tuple[MigDevice, ...]:
        found = []
        for number in range(self.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            mig = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            if mig is None:
                continue
            name = _text(self.ask("nvmlDeviceGetName", mig))
            found.append(
                MigDevice(
                    uuid=_text(self.nvml.nvmlDeviceGetUUID(mig)),
                    profile=name.rpartition("MIG ")[2],
                    gpu_instance=self.ask("nvmlDeviceGetGpuInstanceId", mig),
                    compute_instance=self.ask("nvmlDeviceGetComputeInstanceId", mig),
                    memory_mib=self.memory(mig)[0],
                )
            )
        return tuple(found)

    def processes(self, handle: Any) -> tuple[GpuProcess, ...]:
        found: dict[int, GpuProcess] = {}
        for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            for process in self.ask(function, handle) or []:
                used = process.usedGpuMemory
                found[process.pid] = GpuProcess(
                    pid=process.pid,
                    used_mib=None if used is None else used // MIB,
                    command=self.command_of(process.pid),
                )
        return tuple(found.values())


def _names(bits: int | None) -> tuple[str, ...] | None:
    return None if bits is None else reason_names(bits)


def _text(value: object) -> str:
    """Older bindings answer bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else "" if value is None else str(value)


def _cpu_words() -> int:
    return ((psutil.cpu_count() or 1) + 63) // 64 + 16


def _cpu_list(words: Any) -> str:
    """Words of an affinity mask as `0-3,8`."""
    return core_list(w * 64 + b for w, word in enumerate(words or []) for b in range(64) if word >> b & 1)
