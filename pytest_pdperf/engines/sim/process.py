"""What the process of every simulated engine does: load, listen, serve, and end when it is told to."""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from pytest_pdperf.errors import UsageProblem

from .http import Connection
from .live import Breakable, with_live_faults
from .log import Log
from .profile import VERSION
from .settings import Settings


class EngineProcess(ABC):
    """One engine process in one engine's dialect: what it says, and which sockets it has beside HTTP's."""

    protocol = ""
    """What the first line says of the protocol."""
    last_words = "Shutting down."

    def __init__(self, settings: Settings, log: Log, port: int) -> None:
        self.settings, self.log, self.port = settings, log, port

    @abstractmethod
    def loading(self) -> str:
        """The line at the begin of the load."""

    @abstractmethod
    def loaded(self, took_s: float) -> str:
        """The line at its end."""

    @abstractmethod
    def make(self, loop: asyncio.AbstractEventLoop) -> Breakable:
        """The engine; it exists from the end of the load on."""

    @abstractmethod
    async def listen_beside(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open what the engine listens on beside HTTP, and say what it says before HTTP's port is open."""

    @abstractmethod
    def ready(self) -> tuple[str, ...]:
        """Lines once HTTP's port is open."""

    async def until(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set."""
        await stop.wait()

    async def serve(self) -> None:
        """Load, listen, and serve until SIGTERM or SIGINT. Raises OSError for a port that is taken."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        self.log.info(self.loading())
        began = time.monotonic()
        load_s = self.settings.profile.load_s + self.settings.faults.slow_start
        loading = asyncio.ensure_future(asyncio.sleep(load_s))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return
        self.log.info(self.loaded(time.monotonic() - began))
        handle = with_live_faults(self.make(loop), self.log)
        connections: set[Connection] = set()
        await self.listen_beside(loop)
        await loop.create_server(
            lambda: Connection(handle, self.log.access, connections),
            self.settings.host,
            self.port,
            backlog=1024,
        )
        gc.collect()
        gc.freeze()
        for line in self.ready():
            self.log.info(line)
        await self.until(stop)
        for connection in list(connections):
            connection.abort()
        self.log.info(self.last_words)


def run(
    options: argparse.Namespace,
    log: Log,
    settings_of: Callable[[argparse.Namespace], Settings],
    process: Callable[[Settings, Log, int], EngineProcess],
) -> int:
    """Run one engine to its end; the exit status is 2 for bad options, 1 for a taken port and 0 after SIGTERM."""
    import uvloop

    try:
        settings = settings_of(options)
    except UsageProblem as problem:
        log.error(str(problem))
        return 2
    engine = process(settings, log, options.port)
    log.info(
        f"SIMULATED engine, version {VERSION}: {engine.protocol}role {settings.role.value}, "
        f"profile {settings.profile.name}"
    )
    if options.ignored:
        log.info(f"ignoring engine arguments without meaning for a simulation: {options.ignored}")
    if settings.faults.active:
        log.warning(f"faults: {options.faults}")
    for name in settings.faults.without_effect_on(settings.role):
        log.warning(f"fault {name} has no effect on role {settings.role.value}")
    try:
        uvloop.run(engine.serve())
    except OSError as problem:
        log.error(f"cannot listen on {settings.host}:{options.port}: {problem}")
        return 1
    return 0
