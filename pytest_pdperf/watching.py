"""Watches a stack from its bring-up on: its GPUs, logs and roles, what its router costs, and whether it lives."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from .errors import RoleDied
from .evidence.cell_evidence import Watched
from .evidence.cell_window import SETTLE_TIMEOUT_S, StackWatch
from .evidence.drain import wait_drained
from .evidence.exposition import Snapshot, Unknown
from .evidence.first_requests import doubt
from .evidence.naming import died
from .evidence.outside import outside_ms
from .gpus.grammar import Device
from .gpus.inventory import Gpu
from .measure.records import CellRecords, Status
from .sites import Site
from .spec.topology import Role, Topology
from .stack.launch import Stack
from .stack.overhead import measure_router_overhead
from .stack.running import Serving

DEATH_NOTICE_S = 1.0


def watch_stack(
    stack: Stack,
    topology: Topology,
    site: Site,
    tell: Callable[[str], None],
    warn: Callable[[str], None] = lambda text: None,
) -> StackWatch:
    """A watch over every later cell of the stack. Times its router now, while nothing else runs.

    `tell` is given details, `warn` what makes measuring pointless: first requests that no KV was transferred for.
    """
    pages: list[Mapping[str, Snapshot | Unknown]] = []
    overhead = measure_router_overhead(
        stack.plan, mark=lambda: pages.append(wait_drained(stack.role_urls, SETTLE_TIMEOUT_S).snapshots)
    )
    if overhead.reason:
        tell(f"router overhead not measured: {overhead.reason}")
    watched = watched_of(stack, topology, site)
    watched = replace(watched, router_ms=overhead.added_ms)
    if pages and not watched.whole_blocks and (text := doubt(watched.kind, pages[0], watched.roles)):
        warn(text)
    if overhead.direct_mean_ms is not None and len(pages) == 2:
        http = outside_ms(watched, pages[0], pages[1], overhead.direct_mean_ms)
        watched = replace(watched, http_ms=http)
    return StackWatch(watched)


def watched_of(stack: Stack, topology: Topology, site: Site) -> Watched:
    """What evidence needs to know of a stack, as far as it is known without asking it anything."""
    placement, inventory = site.placement(topology.name), site.wiring

    def gpus_of(devices: Sequence[Device]) -> list[Gpu]:
        return [gpu for device in devices if (gpu := inventory.gpu(device.uuid)) is not None]

    ends = {
        role: [gpu for one in placement.placed if one.role is role for gpu in gpus_of(one.devices)]
        for role in (Role.PREFILL, Role.DECODE)
    }
    paths = [inventory.link(a, b) for a in ends[Role.PREFILL] for b in ends[Role.DECODE]]
    return Watched(
        kind=topology.kind,
        roles={instance.id: instance.role for instance in stack.plan.instances},
        urls=stack.role_urls,
        router_page=stack.router_metrics_url,
        logs=stack.logs,
        uuids=tuple(dict.fromkeys(gpu.uuid for one in placement.placed for gpu in gpus_of(one.devices))),
        asked=topology.kv_transfer.transport if topology.kv_transfer else "auto",
        whole_blocks=topology.kv_transfer is not None and topology.kv_transfer.connector == "example",
        nvlink_between=all(path.startswith("NV") for path in paths) if paths else None,
        here=site.here,
        tensor_parallel=any(spec.tensor_parallel > 1 for spec in topology.roles.values()),
    )


@contextmanager
def told_of_deaths() -> Generator[None]:
    """A process that dies in here is named as the fault that it is, in the words of every other fault."""
    try:
        yield
    except RoleDied as death:
        death.add_note(f"cause: {died(death).line}")
        raise


def blame_a_death(stack: Serving, records: CellRecords, clock: Callable[[], float] = time.monotonic) -> None:
    """Raise RoleDied when a process has ended, also when its requests failed faster than anyone looked.

    A dying process answers its clients before it is seen to be gone: after a failed request it gets a second.
    """
    failed = any(request.status is not Status.OK for request in records.requests)
    deadline = clock() + (DEATH_NOTICE_S if failed else 0.0)
    while True:
        stack.check()
        if clock() >= deadline:
            return
        time.sleep(0.05)
