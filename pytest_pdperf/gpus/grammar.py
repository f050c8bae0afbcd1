"""`--gpus` means one thing only: which devices, in which order, and what to call them for a child process.

`parse_gpus` reads the text alone; `resolve` then looks at the machine and at CUDA_VISIBLE_DEVICES. Where that
variable is set, an index is a position in its list, as it is for CUDA itself, and the list's own strings are
handed on: a number inside a renumbered container is never put in the place of another.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pytest_pdperf.errors import UsageProblem

from .inventory import Gpu, Inventory, MigDevice

MAX_INDEX = 1023
FORMS = "0-7 | 0,2,4-5 | all | GPU-uuid | MIG-uuid | cpu"

_HEX = "[0-9a-fA-F]"
_RANGE = re.compile(r"([0-9]+)\s*-\s*([0-9]+)\Z")
_GPU = re.compile(rf"GPU-{_HEX}[0-9a-fA-F-]*\Z")
_MIG = re.compile(rf"MIG-{_HEX}[0-9a-fA-F-]*\Z")
_OLD_MIG = re.compile(rf"MIG-GPU-{_HEX}[0-9a-fA-F-]*/[0-9]+/[0-9]+\Z")


class DeviceKind(StrEnum):
    """What a child process is given."""

    GPU = "gpu"
    MIG = "mig"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Device:
    """One thing to run an engine on."""

    visible: str
    """The string for CUDA_VISIBLE_DEVICES, or `cpu`."""
    kind: DeviceKind = DeviceKind.GPU
    uuid: str = ""
    """UUID of the GPU or of the MIG slice; leases and monitoring go by it, never by index."""
    index: int | None = None
    """NVML index of the GPU (for a slice: of the GPU that it is cut from)."""

    def __str__(self) -> str:
        if self.kind is DeviceKind.CPU:
            return "cpu"
        return f"GPU {self.index}" if self.kind is DeviceKind.GPU else f"{self.uuid} on GPU {self.index}"


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """A parsed `--gpus` value: `items` are indices and UUIDs as given, empty for `all` and `cpu`."""

    items: tuple[int | str, ...] = ()
    everything: bool = False
    cpu: bool = False

    def __str__(self) -> str:
        """The shortest text that parses to this request."""
        if self.cpu or self.everything:
            return "cpu" if self.cpu else "all"
        runs: list[list[int | str]] = []
        for item in self.items:
            last = runs[-1][-1] if runs else None
            if isinstance(item, int) and isinstance(last, int) and item == last + 1:
                runs[-1].append(item)
            else:
                runs.append([item])
        return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def parse_gpus(text: str) -> GpuRequest:
    """Read a `--gpus` value. `4` is index 4, not four GPUs.

    Raises UsageProblem, naming the part that is wrong, for anything unknown, empty, negative, backwards or
    named twice.
    """
    word = text.strip().lower()
    if word in ("all", "cpu"):
        return GpuRequest(everything=word == "all", cpu=word == "cpu")
    if not word:
        raise UsageProblem(f"--gpus is empty; give {FORMS}")
    items: list[int | str] = []
    source: dict[int | str, str] = {}
    for raw in text.split(","):
        part = raw.strip()
        for item in _part(part, text):
            key = item.lower() if isinstance(item, str) else item
            if key in source:
                again = f"in {source[key]!r} and in {part!r}" if source[key] != part else f"as {part!r}"
                name = f"GPU {item}" if isinstance(item, int) else item
                raise UsageProblem(f"--gpus {text!r}: {name} is named twice ({again})")
            source[key] = part
            items.append(item)
    return GpuRequest(tuple(items))


def _part(part: str, text: str) -> list[int | str]:
    where = f"--gpus {text!r}: "
    if not part:
        raise UsageProblem(f"{where}an empty place between commas")
    if part.lower() in ("all", "cpu"):
        raise UsageProblem(f"{where}{part!r} stands alone; it cannot be joined with other devices")
    if re.fullmatch(r"[0-9]+", part):
        return [_index(part, where)]
    if re.fullmatch(r"-\s*[0-9]+", part):
        raise UsageProblem(f"{where}{part!r} is negative; indices start at 0")
    match = _RANGE.match(part)
    if match:
        low, high = _index(match[1], where), _index(match[2], where)
        if high < low:
            raise UsageProblem(f"{where}the range {part!r} runs backwards; write {high}-{low}")
        return list(range(low, high + 1))
    if _GPU.match(part) or _MIG.match(part) or _OLD_MIG.match(part):
        return [part]
    hint = ""
    if re.fullmatch(r"[0-9]+\s*(:|\.\.)\s*[0-9]+", part):
        hint = f"; a range is written {re.sub(r'[^0-9]+', '-', part)}"
    elif part.lower().startswith("device="):
        hint = "; leave Docker's `device=` out"
    elif part.upper().startswith(("GPU", "MIG")):
        hint = "; a UUID looks like GPU-5fd4b2c1-... or MIG-5fd4b2c1-... (nvidia-smi -L lists them)"
    raise UsageProblem(f"{where}cannot read {part!r}{hint}; use {FORMS}")


def _index(digits: str, where: str) -> int:
    if len(digits) > 6 or int(digits) > MAX_INDEX:
        raise UsageProblem(f"{where}{digits[:12]} is no GPU index (largest {MAX_INDEX})")
    return int(digits)


def resolve(
    request: GpuRequest, inventory: Inventory, cuda_visible_devices: str | None
) -> tuple[Device, ...]:
    """The devices of a request on this machine, in the order asked for. Never empty.

    `cuda_visible_devices` is the parent's variable: None when unset, which differs from set but empty. Raises
    UsageProblem for a machine without driver, an index or UUID that is not there, an ambiguous abbreviation,
    and a GPU that is cut into MIG slices.
    """
    if request.cpu:
        return (Device("cpu", DeviceKind.CPU),)
    where = f"--gpus {request}: "
    if not inventory.gpus:
        raise UsageProblem(
            f"{where}{inventory.problem or 'no GPU found'}; use --engine sim for simulated engines, "
            "or --gpus cpu for real engines on CPU"
        )
    visible = visible_devices(inventory, cuda_visible_devices)
    if not visible:
        raise UsageProblem(
            f"{where}CUDA_VISIBLE_DEVICES={cuda_visible_devices!r} hides every GPU of this machine; "
            "unset it or name GPUs in it"
        )
    if request.everything:
        return _without_cut(visible, inventory, cuda_visible_devices, where)
    found: list[Device] = []
    for item in request.items:
        device = (
            _by_index(item, visible, inventory, cuda_visible_devices, where)
            if isinstance(item, int)
            else _by_uuid(item, visible, inventory, cuda_visible_devices, where)
        )
        twice = next((i for i, other in enumerate(found) if other.uuid == device.uuid), None)
        if twice is not None:
            raise UsageProblem(f"{where}{request.items[twice]} and {item} are the same device, {device.uuid}")
        found.append(device)
    return tuple(found)


def visible_devices(inventory: Inventory, cuda_visible_devices: str | None) -> tuple[Device, ...]:
    """Devices that CUDA would show this process, in CUDA's order, each with the parent's own string.

    CUDA's rules, as measured with driver 580: unset shows all; an entry that names nothing (`-1`, an index too
    large, an unknown UUID), or a UUID after numbers and the reverse, hides itself and all that follow. Naming a
    device twice makes the whole list invalid, and `1;0` is read as 1: both are a UsageProblem here.
    """
    if cuda_visible_devices is None:
        return tuple(_whole(str(gpu.index), gpu) for gpu in inventory.gpus)
    found: list[Device] = []
    for raw in cuda_visible_devices.split(","):
        entry = raw.strip()
        if re.match(r"\+?[0-9]", entry) and not entry.isdecimal():
            raise UsageProblem(
                f"CUDA_VISIBLE_DEVICES={cuda_visible_devices!r}: cannot read {entry!r}; use commas"
            )
        device = _named(entry, inventory)
        if device is None or (found and found[0].visible.isdecimal() != entry.isdecimal()):
            break
        twice = next((other for other in found if other.uuid == device.uuid), None)
        if twice is not None:
            raise UsageProblem(
                f"CUDA_VISIBLE_DEVICES={cuda_visible_devices!r}: {twice.visible!r} and {entry!r} are one "
                "device; the driver rejects such a list"
            )
        found.append(device)
    return tuple(found)


def device_env(devices: Sequence[Device], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that show a child process exactly these devices.

    Indices count in PCI bus order only under CUDA_DEVICE_ORDER=PCI_BUS_ID, so that is set unless the parent
    chose. CPU devices hide every GPU (set but empty).
    """
    environ = os.environ if environ is None else environ
    strings = [device.visible for device in devices if device.kind is not DeviceKind.CPU]
    order = {} if "CUDA_DEVICE_ORDER" in environ or not strings else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {"CUDA_VISIBLE_DEVICES": ",".join(strings), **order}


def _whole(visible: str, gpu: Gpu) -> Device:
    return Device(visible, DeviceKind.GPU, gpu.uuid, gpu.index)


def _slice(visible: str, gpu: Gpu, mig: MigDevice) -> Device:
    return Device(visible, DeviceKind.MIG, mig.uuid, gpu.index)


def _named(entry: str, inventory: Inventory) -> Device | None:
    """The device that one CUDA_VISIBLE_DEVICES entry names, None when it names none or several."""
    if re.fullmatch(r"[0-9]{1,6}", entry):
        return next((_whole(entry, gpu) for gpu in inventory.gpus if gpu.index == int(entry)), None)
    matches = _matches(entry, inventory)
    return matches[0] if len(matches) == 1 else None


def _matches(entry: str, inventory: Inventory) -> list[Device]:
    """Devices whose UUID starts with `entry`; slices also by the old form MIG-GPU-uuid/instance/instance."""
    wanted = entry.lower()
    if _OLD_MIG.match(entry):
        uuid, instance, compute = wanted.removeprefix("mig-").split("/")
        return [
            _slice(entry, gpu, mig)
            for gpu in inventory.gpus
            for mig in gpu.mig_devices
            if gpu.uuid.lower() == uuid
            and (mig.gpu_instance, mig.compute_instance) == (int(instance), int(compute))
        ] or [
            _slice(entry, gpu, mig)
            for gpu in inventory.gpus
            for mig in gpu.mig_devices
            if mig.uuid.lower() == wanted
        ]
    if _GPU.match(entry):
        return [_whole(entry, gpu) for gpu in inventory.gpus if gpu.uuid.lower().startswith(wanted)]
    if _MIG.match(entry):
        slices = [(gpu, mig) for gpu in inventory.gpus for mig in gpu.mig_devices]
        return [_slice(entry, gpu, mig) for gpu, mig in slices if mig.uuid.lower().startswith(wanted)]
    return []


def _by_index(
    index: int, visible: Sequence[Device], inventory: Inventory, variable: str | None, where: str
) -> Device:
    if index >= len(visible):
        last = len(visible) - 1
        have = "one, index 0" if last == 0 else f"{len(visible)}, indices 0-{last}"
        if variable is None:
            raise UsageProblem(f"{where}there is no GPU {index}; this machine has {have}")
        raise UsageProblem(
            f"{where}there is no GPU {index}; CUDA_VISIBLE_DEVICES={variable!r} shows {have} "
            "(positions in that list)"
        )
    device = visible[index]
    _refuse_cut(device, inventory, where)
    return device


def _by_uuid(
    uuid: str, visible: Sequence[Device], inventory: Inventory, variable: str | None, where: str
) -> Device:
    """The device of a UUID: under the parent's own string if there is one, else under the word given."""
    matches = _matches(uuid, inventory)
    if not matches:
        known = [gpu.uuid for gpu in inventory.gpus] + [
            mig.uuid for gpu in inventory.gpus for mig in gpu.mig_devices
        ]
        shown = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
        raise UsageProblem(f"{where}no device {uuid} on this machine; it has {shown}")
    if len(matches) > 1:
        raise UsageProblem(
            f"{where}{uuid} is ambiguous: {', '.join(match.uuid for match in matches)}; write more of it"
        )
    device = matches[0]
    shown_as = next((other for other in visible if other.uuid == device.uuid), None)
    parent = next(
        (other for other in visible if other.kind is DeviceKind.GPU and other.index == device.index), None
    )
    if shown_as is None and (device.kind is DeviceKind.GPU or parent is None):
        raise UsageProblem(f"{where}{uuid} is there, but CUDA_VISIBLE_DEVICES hides it from this process")
    _refuse_cut(device, inventory, where)
    return device if variable is None or shown_as is None else shown_as


def _refuse_cut(device: Device, inventory: Inventory, where: str) -> None:
    gpu = inventory.gpu(device.uuid)
    if device.kind is DeviceKind.GPU and gpu is not None and gpu.mig_enabled:
        slices = ", ".join(mig.uuid for mig in gpu.mig_devices)
        raise UsageProblem(
            f"{where}GPU {gpu.index} is in MIG mode; name its slices: {slices}"
            if slices
            else f"{where}GPU {gpu.index} is in MIG mode and has no slice; create one or switch MIG off"
        )


def _without_cut(
    visible: Sequence[Device], inventory: Inventory, variable: str | None, where: str
) -> tuple[Device, ...]:
    """`all`: whole GPUs as they are, GPUs in MIG mode as their slices."""
    found: list[Device] = []
    for device in visible:
        gpu = inventory.gpu(device.uuid)
        if device.kind is DeviceKind.GPU and gpu is not None and gpu.mig_enabled:
            found += [_slice(mig.uuid, gpu, mig) for mig in gpu.mig_devices]
        else:
            found.append(device)
    if not found:
        raise UsageProblem(
            f"{where}every visible GPU is in MIG mode and has no slice (CUDA_VISIBLE_DEVICES={variable!r})"
        )
    return tuple(found)
