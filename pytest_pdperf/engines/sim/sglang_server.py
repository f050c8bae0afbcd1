"""The process of a simulated SGLang engine: `python -m pytest_pdperf.engines.sim.sglang_server --role decode ...`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from functools import partial

from pytest_pdperf.spec.roles import Role

from .log import Log
from .process import EngineProcess, run
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


class SglangProcess(EngineProcess):
    """A process that talks and listens like `sglang.launch_server`."""

    protocol = "SGLang's protocol, "
    last_words = "SIGTERM received. Shutting down."

    def __init__(self, settings: Settings, log: Log, port: int, dialect: Dialect) -> None:
        super().__init__(settings, log, port)
        self._dialect = dialect

    def loading(self) -> str:
        """As SGLang says it."""
        return f"Load weight begin. model={self.settings.profile.name} (simulated)"

    def loaded(self, took_s: float) -> str:
        """As SGLang says it."""
        return f"Load weight end. elapsed={took_s:.2f} s (simulated)"

    def make(self, loop: asyncio.AbstractEventLoop) -> SglangEngine:
        """The engine."""
        self._engine = engine = SglangEngine(self.settings, self.log, dialect=self._dialect)
        engine.runner.timer = make_timer(loop, engine.runner.wake)
        return engine

    async def listen_beside(self, loop: asyncio.AbstractEventLoop) -> None:
        """Prefill's bootstrap server."""
        if self.settings.role is not Role.PREFILL:
            return
        host, port = self.settings.host, self.settings.side_channel_port
        await loop.create_server(lambda: SideChannelServer(self._engine.rooms.handle), host, port)
        self.log.info(f"CommonKVBootstrapServer started successfully on {host}:{port} (simulated)")

    def ready(self) -> tuple[str, ...]:
        """As uvicorn and SGLang say it."""
        return (
            f"Uvicorn running on http://{self.settings.host}:{self.port} (simulated)",
            "The server is fired up and ready to roll!",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one engine; for the exit status see `process.run`."""
    own, rest = split_arguments(sys.argv[1:] if argv is None else argv)
    dialect = Dialect(own.incremental_streaming_output, own.metrics_form == "old")
    return run(parse_arguments(rest), SglangLog(), settings_of, partial(SglangProcess, dialect=dialect))


if __name__ == "__main__":
    sys.exit(main())
