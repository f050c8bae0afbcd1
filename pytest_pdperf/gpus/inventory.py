"""What GPUs a machine has and how they are wired, as data: placement and checks are pure functions of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.topology import Frozen

LINKS = ("X", "NV", "PIX", "PXB", "PHB", "NODE", "SYS", "?")
"""Kinds of path between two GPUs, nearest first: itself, NVLink (`NV18` = 18 links), PCIe switch, several
switches, host bridge, NUMA node, between sockets, unknown."""


class GpuProcess(Frozen):
    """A process that holds memory on a GPU."""

    pid: int
    used_mib: int | None = None
    command: str = ""


class MigDevice(Frozen):
    """One slice of a GPU: to CUDA a device of its own, never part of a group."""

    uuid: str
    profile: str = ""
    gpu_instance: int | None = None
    compute_instance: int | None = None
    memory_mib: int | None = None


class Gpu(Frozen):
    """One GPU as the driver sees it. None means that the driver does not say."""

    index: int = Field(ge=0)
    """NVML's index: PCI bus order, and blind to CUDA_VISIBLE_DEVICES."""
    uuid: str
    name: str
    memory_mib: int
    used_mib: int | None = None
    numa_node: int | None = None
    cpus: str = ""
    """CPUs near the GPU, as `0-55,112-167`."""
    pci_bus: str = ""
    links: tuple[str, ...] = ()
    """Path to the GPU at each place of the inventory; see LINKS."""
    mig_enabled: bool = False
    mig_devices: tuple[MigDevice, ...] = ()
    ecc_enabled: bool | None = None
    ecc_uncorrected: int | None = None
    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    memory_mhz: int | None = None
    memory_max_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    """Reasons that slow the GPU now; idling is not among them."""
    processes: tuple[GpuProcess, ...] = ()


class Inventory(Frozen):
    """All GPUs of one machine."""

    origin: str = ""
    """How this came about: read from a driver, or written by hand after documented wiring."""
    driver: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""
    """Why there are no GPUs, when there are none."""

    def gpu(self, uuid: str) -> Gpu | None:
        """The GPU with this UUID, or the one that this MIG slice is cut from."""
        return next(
            (g for g in self.gpus if g.uuid == uuid or any(m.uuid == uuid for m in g.mig_devices)), None
        )

    def memory_mib(self, uuid: str) -> int | None:
        """MiB of a GPU or of a MIG slice, None when the driver does not say."""
        found = self.gpu(uuid)
        if found is None or found.uuid == uuid:
            return found.memory_mib if found is not None else None
        return next(m.memory_mib for m in found.mig_devices if m.uuid == uuid)

    def link(self, first: Gpu, second: Gpu) -> str:
        """Path between two GPUs, `?` when it is not known."""
        place = next((i for i, gpu in enumerate(self.gpus) if gpu.uuid == second.uuid), len(first.links))
        return first.links[place] if place < len(first.links) else "?"

    def islands(self) -> dict[str, int]:
        """UUID -> number of its NVLink island: GPUs that are all joined to each other. No NVLink, no entry."""
        islands: list[list[Gpu]] = []
        for gpu in self.gpus:
            home = next((i for i in islands if all(self.link(gpu, o).startswith("NV") for o in i)), None)
            if home is None:
                islands.append([gpu])
            else:
                home.append(gpu)
        joined = [island for island in islands if len(island) > 1]
        return {gpu.uuid: number for number, island in enumerate(joined) for gpu in island}


def load_recorded(path: Path) -> Inventory:
    """An inventory from a JSON file that `Inventory.model_dump_json` wrote. Raises UsageProblem."""
    try:
        return Inventory.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageProblem(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageProblem(f"{path}: not a recorded inventory: {where}: {first['msg']}") from None


def describe(gpus: Sequence[Gpu]) -> str:
    """`8 x NVIDIA H100 80GB HBM3` for one line of a report; different models are joined by `+`."""
    counts: dict[str, int] = {}
    for gpu in gpus:
        counts[gpu.name] = counts.get(gpu.name, 0) + 1
    return " + ".join(f"{count} x {name}" for name, count in counts.items()) or "no GPU"
