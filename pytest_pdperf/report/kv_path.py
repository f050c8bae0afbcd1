"""Which topologies differ only in how the KV cache moves: TCP is read beside RDMA, not beside a stranger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pytest_pdperf.gate.fingerprint import digest_of
from pytest_pdperf.spec.topology import Topology

T = TypeVar("T")

KEY = "kv_path"
"""Where a cell's details hold it."""
_FALLBACK = "tcp"
"""The transport that others are not held against: what is left where nothing better is there."""


@dataclass(frozen=True, slots=True)
class KvPath:
    """How a topology was asked to move its KV cache, and what it is apart from that."""

    layout: str
    """Digest of the topology without its name and `kv_transfer`."""
    connector: str
    transport: str

    @property
    def fallback(self) -> bool:
        """Whether this is the slow path that is held against another, never the reference."""
        return self.transport == _FALLBACK


def details_of(topology: Topology) -> dict[str, Any]:
    """The entry of a cell's details; empty for topologies that move no KV."""
    if topology.kv_transfer is None:
        return {}
    layout = digest_of(topology.model_dump(mode="json", exclude={"name", "kv_transfer"}))
    return {KEY: {"layout": layout, **topology.kv_transfer.model_dump(mode="json")}}


def read_kv_path(details: Mapping[str, Any]) -> KvPath | None:
    """That entry read back; None in runs of older versions and in files that hold something else there."""
    found = details.get(KEY)
    if not isinstance(found, Mapping):
        return None
    values = [found.get(name) for name in ("layout", "connector", "transport")]
    return KvPath(*map(str, values)) if all(isinstance(value, str) for value in values) else None


def kin_together(items: Iterable[T], path: Callable[[T], KvPath | None]) -> list[T]:
    """The items in their order, but for those of one layout, which follow the first of them."""
    groups: dict[object, list[T]] = {}
    for number, item in enumerate(items):
        found = path(item)
        groups.setdefault(found.layout if found is not None else number, []).append(item)
    return [item for group in groups.values() for item in group]
