"""A stack is gone when its GPUs are as empty as before it: memory that stays in use spoils what is measured next."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from .grammar import Device, DeviceKind
from .inventory import Inventory
from .nvml import GpuSample, read_samples

SLACK_MIB = 256
"""Memory that a driver may keep for itself after the last process has ended (contexts, persistence)."""
TIMEOUT_S = 30.0
"""A driver frees tens of GiB of a killed process in seconds."""
POLL_S = 0.25

Read = Callable[[Collection[str]], Iterable[GpuSample]]


def memory_in_use(devices: Sequence[Device], inventory: Inventory) -> dict[str, int]:
    """UUID -> MiB in use before the first launch, for whole GPUs whose driver says it.

    MIG slices are left out: memory is counted for the whole GPU, where other slices may work by right.
    """
    whole = [device for device in devices if device.kind is DeviceKind.GPU]
    gpus = [gpu for device in whole if (gpu := inventory.gpu(device.uuid)) is not None]
    return {gpu.uuid: gpu.used_mib for gpu in gpus if gpu.used_mib is not None}


def wait_emptied(
    before: Mapping[str, int],
    *,
    read: Read = read_samples,
    timeout_s: float = TIMEOUT_S,
    slack_mib: int = SLACK_MIB,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[str, ...]:
    """Wait until every GPU is back at `before` (UUID -> MiB in use) plus `slack_mib`.

    Returns one line for each GPU that is not after `timeout_s` seconds, with the processes that hold its memory;
    empty when all is well. A GPU that no longer answers cannot be told to be empty and gets a line too.
    """
    until = clock() + timeout_s
    while before:
        lines = _still_full(before, list(read(tuple(before))), slack_mib)
        if not lines:
            break
        if clock() >= until:
            return tuple(f"{line}, {timeout_s:g} s after tear-down" for line in lines)
        sleep(POLL_S)
    return ()


def _still_full(before: Mapping[str, int], samples: Sequence[GpuSample], slack_mib: int) -> list[str]:
    by_uuid = {sample.uuid: sample for sample in samples}
    lines = []
    for uuid, was in before.items():
        sample = by_uuid.get(uuid)
        if sample is None or sample.used_mib is None:
            lines.append(
                f"{uuid}: the driver does not say how much memory is in use ({was} MiB before the launch)"
            )
        elif sample.used_mib > was + slack_mib:
            lines.append(
                f"{uuid}: {sample.used_mib} MiB in use, {was} MiB before the launch, {_holders(sample)}"
            )
    return lines


def _holders(sample: GpuSample) -> str:
    if not sample.processes:
        return "held by no process that can be seen from here"
    shown = (
        f"pid {p.pid}"
        + (f" ({p.used_mib} MiB)" if p.used_mib is not None else "")
        + (f" {p.command[:80]}" if p.command else "")
        for p in sample.processes
    )
    return "held by " + ", ".join(shown)
