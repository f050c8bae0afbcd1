"""Where a run takes place: which devices it has, who else may not use them, and what starts processes there."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from .evidence.canary import Canaries, Canary, canaries_for
from .gpus.busy import check_idle
from .gpus.disjoint import place_in_turn
from .gpus.emptied import memory_in_use, wait_emptied
from .gpus.foreign import ForeignUse
from .gpus.grammar import Device, resolve
from .gpus.inventory import Inventory
from .gpus.lease import Lease, acquire
from .gpus.nvml import read_inventory
from .gpus.placement import Placement, place_all
from .inputs import Inputs
from .options import Settings
from .provenance import Hardware, hardware_of
from .slurm_site import SlurmSite
from .spec.topology import Topology
from .stack.launcher import LOCAL, Launcher
from .stack.ports import PortRegistry
from .stack.slurm.asking import read_wish


class Site(Protocol):
    """One machine, or the nodes of a Slurm job. All methods are called from pytest's main thread."""

    here: bool
    """The stacks run on this machine, so its drivers, counters and processors say something about them."""
    devices: tuple[Device, ...]
    """Devices that are known by name; none for the simulator, and where somebody else hands them out."""
    inventory: Inventory
    gpu_mib: dict[str, int]
    """Visible name of a GPU -> its memory; empty for simulated engines, which take none, and where nobody knows."""
    ports: PortRegistry
    unknown: tuple[str, ...]
    """What every cell has to say that nobody looked at, one line each."""

    def prepare(self, topologies: Sequence[Topology], *, in_turn: bool) -> None:
        """Find devices and a place for every topology, `in_turn`: apart from the one before. Raises UsageProblem."""

    @property
    def wiring(self) -> Inventory:
        """What evidence may hold this machine's drivers to; empty where they know nothing of the devices."""

    def reserve(self) -> None:
        """Keep the place for this run alone until `release`. Raises UsageProblem when it is not to be had."""

    def hold(self) -> None:
        """Keep it for the workers of this run, in the process that starts them. Raises UsageProblem."""

    def take_turn(self) -> None:
        """Wait until no other worker of this run has a launch here; a worker calls it before each of its own."""

    def end_turn(self) -> None:
        """Let another worker have its turn; safe to call without one."""

    def check(self) -> None:
        """Raise UsageProblem when the reserved place is lost, so that nothing can be started there any more."""

    def placement(self, topology: str) -> Placement:
        """Which instance of a topology gets which devices."""

    def explain(self, topology: str) -> list[str]:
        """The same for people, one line for each instance."""

    def visible(self, topology: Topology) -> Mapping[str, tuple[str, ...]]:
        """Instance id -> device strings for its engine."""

    def launcher(self, topology: Topology) -> Launcher:
        """What starts the processes of a topology."""

    def describe(self) -> list[str]:
        """Lines for `--plan` about the place itself."""

    def hardware(self) -> Hardware:
        """What the numbers are measured on: the part of a baseline's key that the machine decides."""

    def facts(self) -> Mapping[str, str]:
        """What a launch's environment records of the place."""

    def canaries(self, take: Callable[[], Canary], *, off: str, say: Callable[..., None]) -> Canaries:
        """What times fixed work before and after a launch; `take` does it on the GPUs of this machine."""

    def foreign(
        self, own_pids: Callable[[], Collection[int]], only: Collection[str] | None = None
    ) -> ForeignUse:
        """Who looks whether somebody else uses the devices, or `only` those UUIDs, while a cell runs."""

    def wait_emptied(self, besides: Collection[str] = ()) -> tuple[str, ...]:
        """Wait until the devices, `besides` some UUIDs, are as empty as before; one line for each that is not."""

    def release(self) -> tuple[str, ...]:
        """Give the place and its ports back; safe to call again. One line for each thing that stays behind."""


class LocalSite:
    """This machine, with the GPUs of `--gpus`, leased by file locks."""

    here = True
    unknown: tuple[str, ...] = ()

    def __init__(
        self,
        inputs: Inputs,
        settings: Settings,
        tell: Callable[[str], None] = lambda text: None,
        turns: Path | None = None,
    ) -> None:
        """`turns` is the folder by which the workers of a run take turns; None where there is only one process."""
        self._tell = tell
        self.devices: tuple[Device, ...] = ()
        self.inventory = Inventory()
        self.gpu_mib: dict[str, int] = {}
        self.ports = PortRegistry()
        self._inputs, self._settings, self._turns = inputs, settings, turns
        self._placements: dict[str, Placement] = {}
        self._lease: Lease | None = None
        self._memory_before: dict[str, int] = {}
        """GPU -> MiB in use before this run started anything."""

    def prepare(self, topologies: Sequence[Topology], *, in_turn: bool) -> None:
        """Resolve `--gpus`, refuse GPUs in use and ports that are taken, and place every topology."""
        self._find_devices()
        place = place_in_turn if in_turn else place_all
        self._placements = place(topologies, self.devices, self.inventory)
        if self._settings["plan"]:
            self._check_idle()
        for topology in topologies:
            if topology.router.port is not None and self._turns is None:
                self.ports.release(self.ports.reserve_fixed(f"{topology.name} router", topology.router.port))

    def _find_devices(self) -> None:
        request, recorded = self._inputs.gpus, self._inputs.recorded
        if request is None:
            return
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") if recorded is None else None
        if recorded is not None:
            self.inventory = recorded
        elif not request.cpu:
            self.inventory = read_inventory()
        self.devices = resolve(request, self.inventory, visible)
        if not self._inputs.simulated:
            sizes = {device.visible: self.inventory.memory_mib(device.uuid) for device in self.devices}
            self.gpu_mib = {name: mib for name, mib in sizes.items() if mib is not None}

    def _check_idle(self) -> None:
        """Only under a lease: who waits for one must not be refused because its holder computes."""
        if self._inputs.gpus is None or self._inputs.gpus.cpu:
            return
        now = self._inputs.recorded or read_inventory()
        check_idle(self.devices, now)
        if self._inputs.recorded is None:
            self._memory_before = memory_in_use(self.devices, now)

    @property
    def wiring(self) -> Inventory:
        """Nothing when the inventory is a recorded one: no driver of this machine speaks of those GPUs."""
        return self.inventory if self._inputs.recorded is None else Inventory()

    def reserve(self) -> None:
        """Tidy up after dead runs, lock every device, and see that nobody else computes there."""
        self.ports.sweep()
        if self._turns is None and self._lease is None:
            self._lease = acquire(self.devices, self._settings["gpu_wait"] or 0.0, tell=self._tell)
            self._check_idle()

    def hold(self) -> None:
        """Lock every device of `--gpus`."""
        self._find_devices()
        self.reserve()

    def take_turn(self) -> None:
        """By a second lock within the run; the first is the process's that started the workers."""
        if self._turns is not None and self._lease is None:
            self._lease = acquire(self.devices, math.inf, folder=self._turns, tell=self._tell)
            self._check_idle()

    def end_turn(self) -> None:
        """Unlock the second lock."""
        if self._turns is not None and self._lease is not None:
            self._lease.release()
            self._lease = None

    def check(self) -> None:
        """A lock is held until this process ends."""

    def placement(self, topology: str) -> Placement:
        """As `prepare` found it."""
        return self._placements[topology]

    def explain(self, topology: str) -> list[str]:
        """In the placement's own words."""
        return self._placements[topology].explain()

    def visible(self, topology: Topology) -> Mapping[str, tuple[str, ...]]:
        """Strings for CUDA_VISIBLE_DEVICES."""
        placed = self._placements[topology.name].placed
        return {one.instance: tuple(device.visible for device in one.devices) for one in placed}

    def launcher(self, topology: Topology) -> Launcher:
        """Child processes."""
        return LOCAL

    def describe(self) -> list[str]:
        """Nothing: placement says it all."""
        return []

    def hardware(self) -> Hardware:
        """From the driver, or the CPU's model."""
        return hardware_of(self._inputs.measured_gpus, self.devices, self.inventory)

    def facts(self) -> Mapping[str, str]:
        """Nothing that the environment does not read by itself."""
        return {}

    def canaries(self, take: Callable[[], Canary], *, off: str, say: Callable[..., None]) -> Canaries:
        """Those that fit the devices."""
        return canaries_for(self._inputs.measured_gpus, off=off, take=take, say=say)

    def foreign(
        self, own_pids: Callable[[], Collection[int]], only: Collection[str] | None = None
    ) -> ForeignUse:
        """A look at the driver's list of processes about once a second."""
        judged = [device for device in self.devices if only is None or device.uuid in only]
        return ForeignUse(judged if self._inputs.recorded is None else (), own_pids)

    def wait_emptied(self, besides: Collection[str] = ()) -> tuple[str, ...]:
        """By the driver's word on memory in use."""
        return wait_emptied({u: mib for u, mib in self._memory_before.items() if u not in besides})

    def release(self) -> tuple[str, ...]:
        """Unlock ports and devices."""
        self.ports.close()
        if self._lease is not None:
            self._lease.release()
        return ()


SLURM_WAIT_S = 3600.0
"""For a job to start, where nobody says how long: queues are longer than leases."""


def site_for(
    settings: Settings,
    inputs: Inputs,
    run_id: str,
    folder: Path,
    tell: Callable[[str], None],
    *,
    worker: bool = False,
) -> Site:
    """The place that `--launcher` names, for one `worker` of several or for the only process of a run.

    Asks nobody and starts nothing. Raises UsageProblem.
    """
    wait_s = settings["gpu_wait"]
    if settings["launcher"] == "local":
        return LocalSite(inputs, settings, tell, folder / "turns" if worker else None)
    # Each xdist worker has a job of its own.
    suffix = f"-{os.environ.get('PYTEST_XDIST_WORKER', os.getpid())}" if worker else ""
    return SlurmSite(
        wish=read_wish(settings["slurm_arg"]),
        gres=settings["slurm_gres"],
        gpus=(settings["gpus"] or "").strip().lower() != "cpu",
        simulated=inputs.simulated,
        wait_s=SLURM_WAIT_S if wait_s is None else wait_s,
        run_id=run_id,
        log=folder / "logs" / f"slurm-job{suffix}.log",
        tell=tell,
    )
