"""The one small interface behind which every KV connector of vLLM is spoken, and what a connector may use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

from .answer import Answer
from .faults import Dice
from .log import Log
from .metrics import EngineMetrics
from .request import Wanted
from .runner import Runner
from .settings import Settings
from .side_channel import KvLoadError, Pulled


class Transfer(NamedTuple):
    """One finished KV transfer, for the log window of the engine that counts it."""

    seconds: float
    post_s: float
    size: int
    descriptors: int


class Failures(NamedTuple):
    """What went wrong within one log window."""

    transfers: int = 0
    expired: int = 0
    late: int = 0

    @property
    def any(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.transfers or self.expired or self.late)


@dataclass(frozen=True, slots=True)
class Parts:
    """The engine that a connector belongs to, as far as it may touch it."""

    settings: Settings
    engine_id: str
    runner: Runner
    metrics: EngineMetrics
    log: Log
    clock: Callable[[], float]
    random: Random
    drop_transfer: Dice
    through: Callable[[Transfer], None]
    """Told about transfers that this engine counts."""


class Connector(Protocol):
    """Both halves of a way for KV to get from prefill to decode; an engine uses the one of its role."""

    hit_source: str
    """What /metrics calls the place that the KV came from."""
    prometheus: bool
    """Whether /metrics has transfer histograms and failure counters (NIXL); the others leave only log windows."""

    async def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open the ports of this role. Raises OSError for one that is taken."""

    # -- on prefill

    def keeps(self, kv: Mapping[str, object]) -> bool:
        """Whether the blocks of a request with these `kv_transfer_params` stay after its last token."""

    def kept(self, answer: Answer) -> dict[str, object] | None:
        """A prompt is computed: what the answer says of where its KV is."""

    def transferred(self, key: object, end_s: float) -> None:
        """The link is through with a transfer of this engine."""

    # -- on decode

    def offered(self, wanted: Wanted) -> int:
        """Tokens at the start of the prompt whose KV is elsewhere; 0 means that all of it is computed here."""

    async def fetch(self, wanted: Wanted) -> Pulled:
        """Get that KV; returns when the copy is through or, for one that takes no link, ahead of it.

        Raises KvLoadError.
        """

    async def let_go(self, wanted: Wanted, *, fetched: bool) -> None:
        """The request needs the KV at its source no longer. Raises KvLoadError."""

    def failed(self, request_id: str, problem: KvLoadError) -> str:
        """Count a load that failed; returns its log line."""

    # -- in the log

    def window(self, rows: Sequence[Transfer], failures: Failures) -> str | None:
        """The line about one window with something in it, None for a connector that keeps no such count."""


def mean(values: Sequence[float]) -> float:
    """As the windows print it: three places, 0 for none."""
    return round(sum(values) / len(values), 3) if values else 0


def p90(values: Sequence[float]) -> float:
    """Linear between the two nearest, as numpy has it; 0 for none."""
    if not values:
        return 0
    ordered = sorted(values)
    place = 0.9 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return round(ordered[low] + (ordered[high] - ordered[low]) * (place - low), 3)


_MIB = 1024.0 * 1024.0


def sizes(rows: Sequence[Transfer]) -> str:
    """The fields of a window that every connector with windows has; MB is MiB there."""
    size, seconds = sum(row.size for row in rows) / _MIB, sum(row.seconds for row in rows)
    return (
        f"Avg MB per transfer={round(size / len(rows), 3) if rows else 0}, "
        f"Throughput (MB/s)={round(size / seconds, 3) if seconds else 0}, "
        f"Avg number of descriptors={mean([row.descriptors for row in rows])}"
    )


def call_later(seconds: float, action: Callable[[], None]) -> Callable[[], None]:
    """Run `action` later on the running loop; returns how to call it off."""
    return asyncio.get_running_loop().call_later(seconds, action).cancel
