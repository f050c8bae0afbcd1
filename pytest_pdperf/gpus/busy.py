"""A GPU that somebody else computes on gives numbers about the somebody else: say so before the start."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pytest_pdperf.errors import UsageProblem

from .grammar import Device, DeviceKind
from .inventory import Inventory

HIDDEN_MIB = 1024
"""Memory in use without any visible process (a container hides others' pids) that counts as somebody."""


def busy_reasons(
    devices: Sequence[Device], inventory: Inventory, own_pids: Collection[int] = ()
) -> list[str]:
    """One line for each whole GPU that a foreign process uses: which GPU, which process, how much memory.

    MIG slices are not judged: the driver lists processes for the whole GPU, and other slices may work by
    right.
    """
    found = []
    for device in devices:
        gpu = inventory.gpu(device.uuid) if device.kind is DeviceKind.GPU else None
        if gpu is None:
            continue
        foreign = [process for process in gpu.processes if process.pid not in own_pids]
        if foreign:
            users = ", ".join(
                f"process {p.pid}"
                + (f" ({p.used_mib} MiB)" if p.used_mib is not None else "")
                + (f": {p.command}" if p.command else "")
                for p in foreign
            )
            found.append(f"{device} is in use by {users}")
        elif not gpu.processes and gpu.used_mib is not None and gpu.used_mib >= HIDDEN_MIB:
            found.append(f"{device} has {gpu.used_mib} MiB in use by a process that cannot be seen from here")
    return found


def check_idle(devices: Sequence[Device], inventory: Inventory, own_pids: Collection[int] = ()) -> None:
    """Raise UsageProblem when a foreign process uses one of the GPUs."""
    reasons = busy_reasons(devices, inventory, own_pids)
    if reasons:
        raise UsageProblem("\n".join([*reasons, "choose other GPUs, or end these processes first"]))
