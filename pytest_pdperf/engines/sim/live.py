"""Lets a test break a simulated engine that is up: a launch costs seconds, a changed knob a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import orjson

from pytest_pdperf.errors import UsageProblem

from .faults import Faults
from .http import Exchange
from .log import Log

PATH = "/simulator/faults"
"""Where a running engine takes new faults: `POST` with the text of `--faults` as body, empty for a healthy engine."""


class Breakable(Protocol):
    """An engine whose faults can be changed."""

    def handle(self, exchange: Exchange) -> None:
        """Answer one HTTP request."""

    def misbehave(self, faults: Faults) -> None:
        """Break in this way from now on."""


def with_live_faults(engine: Breakable, log: Log) -> Callable[[Exchange], None]:
    """The engine's handler, and before it the one path that no real engine has."""

    def handle(exchange: Exchange) -> None:
        if exchange.path != PATH:
            engine.handle(exchange)
            return
        if exchange.method != "POST":
            exchange.respond(405, b'{"detail":"Method Not Allowed"}')
            return
        text = bytes(exchange.body).decode(errors="replace")
        try:
            faults = Faults.parse(text, PATH)
        except UsageProblem as problem:
            exchange.respond(400, orjson.dumps({"error": {"message": str(problem), "code": 400}}))
            return
        engine.misbehave(faults)
        log.warning(f"faults from now on: {text or 'none'}")
        exchange.respond(200, orjson.dumps({"faults": faults.active}))

    return handle
