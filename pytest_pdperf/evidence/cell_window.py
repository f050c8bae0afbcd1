"""Looks at a stack before, during and after one cell, so that its numbers come with their server side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType

from pytest_pdperf.measure.records import CellRecords
from pytest_pdperf.stack.logs import Follower

from .cell_evidence import CellEvidence, Seen, Watched, judge_cell
from .drain import Drain, wait_drained
from .exposition import Snapshot, Unknown
from .gpu_trace import GpuSampler
from .loading import loading_s
from .log_window import LogWindow
from .scrape import scrape
from .transport import LinkBytes, LogTransport, read_links, read_transport_log

DRAIN_TIMEOUT_S = 30.0
DRAIN_POLL_S = 0.1
SETTLE_TIMEOUT_S = 3.0
"""Before a cell: counters of whatever ran last must stand still, or its requests would be counted as this cell's."""
SAMPLE_PERIOD_S = 1.0
PAGE_TIMEOUT_S = 10.0
MIDWAY_TIMEOUT_S = 1.0
"""A look inside a cell keeps nobody waiting: an engine that is slower to answer has none."""

Drainer = Callable[[Mapping[str, str], float, Mapping[str, Snapshot | Unknown] | None], Drain]


def _drain(
    urls: Mapping[str, str], timeout_s: float, before: Mapping[str, Snapshot | Unknown] | None
) -> Drain:
    return wait_drained(urls, timeout_s, before=before, poll_s=DRAIN_POLL_S, scrape_timeout_s=PAGE_TIMEOUT_S)


def _look(urls: Mapping[str, str]) -> Mapping[str, Snapshot | Unknown]:
    return scrape(urls, MIDWAY_TIMEOUT_S)


def _page(url: str) -> Snapshot | Unknown:
    return scrape({"router": url}, PAGE_TIMEOUT_S)["router"]


@dataclass(frozen=True)
class Instruments:
    """What a window looks through; tests bring their own."""

    drain: Drainer = _drain
    links: Callable[[Iterable[str]], LinkBytes] = read_links
    sampler: Callable[[tuple[str, ...]], GpuSampler] = field(
        default=lambda uuids: GpuSampler(uuids, period_s=SAMPLE_PERIOD_S, clock=time.time)
    )
    page: Callable[[str], Snapshot | Unknown] = _page
    look: Callable[[Mapping[str, str]], Mapping[str, Snapshot | Unknown]] = _look


class TransportLog:
    """What the engines' logs have said about their lanes since the launch began: that is said once, at a handshake."""

    def __init__(self, watched: Watched) -> None:
        self._followers = [Follower(path) for name, path in watched.logs.items() if name in watched.roles]
        self._known = LogTransport()

    def read(self) -> LogTransport:
        """Everything up to now; reads only what is new."""
        for follower in self._followers:
            while lines := follower.new_lines():
                self._known = _joined(self._known, read_transport_log(lines))
        return self._known


def _joined(old: LogTransport, new: LogTransport) -> LogTransport:
    """Both together; tables of a higher rank put all others aside."""
    rank = max(log.bulk_rank for log in (old, new))
    bulk = [log.bulk for log in (old, new) if log.bulk_rank == rank]
    return LogTransport(
        new.backend or old.backend,
        old.families | new.families,
        frozenset().union(*bulk),
        tuple(dict.fromkeys(old.lines + new.lines)),
        rank,
    )


class StackWatch:
    """Watches one stack from cell to cell. One a bring-up: a new stack has new logs and counters."""

    def __init__(self, watched: Watched, instruments: Instruments | None = None) -> None:
        logs = {name: watched.logs[name] for name in watched.roles if name in watched.logs}
        loading = {name: took for name, log in logs.items() if (took := loading_s(log)) is not None}
        self.watched = replace(watched, loading_s=loading, first=True)
        self._instruments = instruments or Instruments()
        self._transport = TransportLog(watched)

    def cell(self) -> CellWindow:
        """The window of the next cell; it opens on `with`."""
        watched, self.watched = self.watched, replace(self.watched, first=False)
        return CellWindow(watched, self._instruments, self._transport)


class CellWindow:
    """One cell: `with watch.cell() as window: records = ...; seen = window.judge(records)`.

    Costs two or three scrapes on either side of the cell, one in its middle where `midway` is called and, with GPUs,
    one driver query a second meanwhile.
    Leaving the block ends the sampler thread, also after an exception.
    """

    def __init__(self, watched: Watched, instruments: Instruments, transport: TransportLog) -> None:
        self._watched = watched
        self._instruments = instruments
        self._transport = transport
        self._exits = ExitStack()
        self._midway: Mapping[str, Snapshot | Unknown] | None = None

    def __enter__(self) -> CellWindow:
        watched, look = self._watched, self._instruments
        self._before = look.drain(watched.urls, SETTLE_TIMEOUT_S, None).snapshots
        self._router = look.page(watched.router_page) if watched.router_page else None
        self._logs = LogWindow({name: watched.logs[name] for name in watched.roles if name in watched.logs})
        self._links = look.links(watched.uuids) if watched.here else LinkBytes()
        self._sampler = self._exits.enter_context(look.sampler(watched.uuids)) if watched.uuids else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    def midway(self) -> None:
        """Half of the cell is over: what becomes slower in it is told from what was slow all along. Looks once."""
        if self._midway is None:
            self._midway = self._instruments.look(self._watched.urls)

    def judge(self, records: CellRecords) -> CellEvidence:
        """Wait until the engines are idle again and judge what was seen. Call it once, inside the block."""
        watched, look = self._watched, self._instruments
        links = look.links(watched.uuids) if watched.here else LinkBytes()
        self._exits.close()
        drain = look.drain(watched.urls, DRAIN_TIMEOUT_S, self._before)
        seen = Seen(
            before=self._before,
            drain=drain,
            lines=self._logs.lines(),
            transport_log=self._transport.read(),
            links_before=self._links,
            links_after=links,
            looks=self._sampler.looks if self._sampler is not None else (),
            failed_looks=self._sampler.failures if self._sampler is not None else 0,
            router_before=self._router,
            router_after=look.page(watched.router_page) if watched.router_page else None,
            midway=self._midway,
        )
        return judge_cell(watched, seen, records)
