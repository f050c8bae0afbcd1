"""Somebody who begins to use a leased GPU while a cell runs makes its numbers about two programs: say who it was."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from .grammar import Device, DeviceKind
from .inventory import GpuProcess
from .nvml import GpuSample, read_samples

PERIOD_S = 1.0

Read = Callable[[Collection[str]], Iterable[GpuSample]]


class ForeignUse:
    """Looks at the leased GPUs about once a second and keeps who does not belong there.

    Made when a stack has just come up. In a container the driver may name pids of the host, which mean nothing here:
    when none of the processes that it names then is one of `own_pids`, all are taken for the stack's own, and only
    those count that appear later. MIG slices are not judged, as in `busy`.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        own_pids: Callable[[], Collection[int]],
        *,
        read: Read = read_samples,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = {d.uuid: str(d) for d in devices if d.kind is DeviceKind.GPU}
        self._own_pids, self._read, self._period_s, self._clock = own_pids, read, period_s, clock
        there = [(uuid, process.pid) for uuid, process in self._processes()]
        own = set(own_pids()) if there else set()
        understood = any(pid in own for _, pid in there)
        self._known = {(uuid, pid) for uuid, pid in there if pid in own or not understood}
        self._found: dict[tuple[str, int], str] = {}
        self._next = clock()

    def look(self) -> None:
        """Look now unless the latest look is less than a period ago; meant to be called often."""
        if not self._names or self._clock() < self._next:
            return
        self._next = self._clock() + self._period_s
        news = [(u, p) for u, p in self._processes() if (u, p.pid) not in self._known | self._found.keys()]
        own = set(self._own_pids()) | {os.getpid()} if news else set()
        for uuid, process in news:
            if process.pid in own:
                self._known.add((uuid, process.pid))
            else:
                self._found[(uuid, process.pid)] = _line(self._names[uuid], process)

    def reasons(self) -> tuple[str, ...]:
        """Why the cell is INVALID: a line for each foreign process seen since the last call. Empties the list."""
        lines = tuple(self._found.values())
        self._found.clear()
        return lines

    def _processes(self) -> list[tuple[str, GpuProcess]]:
        if not self._names:
            return []
        return [(s.uuid, process) for s in self._read(tuple(self._names)) for process in s.processes]


def _line(name: str, process: GpuProcess) -> str:
    used = f" ({process.used_mib} MiB)" if process.used_mib is not None else ""
    command = f": {process.command}" if process.command else ""
    return f"{name} was used by another process meanwhile, pid {process.pid}{used}{command}"
