"""The process of a simulated SGLang engine: `python -m pytest_pdperf.engines.sim.sglang_server --role decode ...`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import sys
import time
from collections.abc import Sequence

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.roles import Role

from .http import Connection
from .live import with_live_faults
from .log import Log
from .profile import VERSION
from .server import parse_arguments, settings_of
from .settings import Settings
from .sglang_app import Dialect, SglangEngine
from .side_channel import SideChannelServer
from .timer import make_timer


class SglangLog(Log):
    """Lines with SGLang's prefix; only what is this simulation's own says ERROR."""

    def _line(self, level: str, message: str) -> None:
        shown = "" if level == "INFO" else f"{level}: "
        self._write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {shown}{message}\n")

    def access(self, peer: str, method: str, path: str, version: str, status: int) -> None:
        """An access line as uvicorn prints it under SGLang."""
        self._write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] ")
        super().access(peer, method, path, version, status)


def split_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """SGLang's own options, and the rest, which every simulated engine takes."""
    parser = argparse.ArgumentParser(prog="pdperf-sim-sglang", add_help=False, allow_abbrev=False)
    parser.add_argument("--incremental-streaming-output", action="store_true")
    parser.add_argument("--metrics-form", choices=("new", "old"), default="new")
    return parser.parse_known_args(argv)


async def serve(settings: Settings, dialect: Dialect, port: int, log: Log) -> None:
    """Load, listen, and serve until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log.info(f"Load weight begin. model={settings.profile.name} (simulated)")
    began = time.monotonic()
    loading = asyncio.ensure_future(asyncio.sleep(settings.profile.load_s + settings.faults.slow_start))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        return
    log.info(f"Load weight end. elapsed={time.monotonic() - began:.2f} s (simulated)")
    engine = SglangEngine(settings, log, dialect=dialect)
    engine.runner.timer = make_timer(loop, engine.runner.wake)
    connections: set[Connection] = set()
    handle = with_live_faults(engine, log)
    if settings.role is Role.PREFILL:
        bootstrap = settings.side_channel_port
        await loop.create_server(lambda: SideChannelServer(engine.rooms.handle), settings.host, bootstrap)
        log.info(f"CommonKVBootstrapServer started successfully on {settings.host}:{bootstrap} (simulated)")
    await loop.create_server(
        lambda: Connection(handle, log.access, connections), settings.host, port, backlog=1024
    )
    gc.collect()
    gc.freeze()
    log.info(f"Uvicorn running on http://{settings.host}:{port} (simulated)")
    log.info("The server is fired up and ready to roll!")
    await stop.wait()
    for connection in list(connections):
        connection.abort()
    log.info("SIGTERM received. Shutting down.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one engine; the exit status is 2 for bad options and 0 after SIGTERM."""
    import uvloop

    own, rest = split_arguments(sys.argv[1:] if argv is None else argv)
    options = parse_arguments(rest)
    log = SglangLog()
    try:
        settings = settings_of(options)
    except UsageProblem as problem:
        log.error(str(problem))
        return 2
    log.info(
        f"SIMULATED engine, version {VERSION}: SGLang's protocol, role {settings.role.value}, "
        f"profile {settings.profile.name}"
    )
    if options.ignored:
        log.info(f"ignoring engine arguments without meaning for a simulation: {options.ignored}")
    if settings.faults.active:
        log.warning(f"faults: {options.faults}")
    for name in settings.faults.without_effect_on(settings.role):
        log.warning(f"fault {name} has no effect on role {settings.role.value}")
    dialect = Dialect(own.incremental_streaming_output, own.metrics_form == "old")
    try:
        uvloop.run(serve(settings, dialect, options.port, log))
    except OSError as problem:
        log.error(f"cannot listen on {settings.host}:{options.port}: {problem}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
