"""Notices processes that live and answer no more, so that a cell fails in seconds, not at its requests' deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx

from pytest_pdperf.stack.access import Access
from pytest_pdperf.stack.greedy import client

PERIOD_S = 1.0
"""Between two looks at the same process."""
TIMEOUT_S = 2.0
"""Of one look."""
SILENCE_S = 10.0
"""Without an answer for so long, over several looks, is a hang; an answer that is merely slow is not."""
MISSES = 3
"""Looks in a row without an answer that it takes at least: a pytest that was itself stopped proves nothing."""
BOUND_S = SILENCE_S + TIMEOUT_S + PERIOD_S
"""A hang is known after this many seconds at the latest, on a machine that lets the watch run."""

Ask = Callable[[str], str]
"""URL -> empty for an answer, else what came instead of one."""


@dataclass(frozen=True, slots=True)
class Hang:
    """One process that stopped answering."""

    instance: str
    silent_s: float
    what: str
    """What the last look got instead of an answer."""


class HangWatch:
    """One daemon thread a process asks for its health about once a second.

    It runs beside the timed path, never in it: the load has a process of its own, and a look is one tiny request on
    a connection of its own. Only what the HTTP server's process does is seen: an engine whose server answers while
    its core hangs is left to the requests' own deadline.
    """

    def __init__(
        self,
        urls: Mapping[str, str],
        *,
        period_s: float = PERIOD_S,
        silence_s: float = SILENCE_S,
        misses: int = MISSES,
        timeout_s: float = TIMEOUT_S,
        ask: Ask | None = None,
        access: Access | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.urls = dict(urls)
        self._period_s, self._silence_s, self._misses = period_s, silence_s, misses
        self._ask, self._timeout_s = ask, timeout_s
        self._open = access.client if access is not None else client
        self._clock = clock
        self._stop = threading.Event()
        self._answered = dict.fromkeys(self.urls, clock())
        self._missed = dict.fromkeys(self.urls, 0)
        self._what = dict.fromkeys(self.urls, "")
        self._threads = [
            threading.Thread(target=self._run, args=(id,), name=f"hang-watch-{id}", daemon=True)
            for id in self.urls
        ]

    def start(self) -> None:
        """Begin to look."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Look no more; a look under way may still end. Wait for that with `join`."""
        self._stop.set()

    def join(self, timeout_s: float = TIMEOUT_S + 1.0) -> None:
        """Wait for the threads to end after `stop`."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))

    def hangs(self) -> tuple[Hang, ...]:
        """Who has been silent for too long by now. Never blocks."""
        now = self._clock()
        return tuple(
            Hang(id, now - self._answered[id], self._what[id])
            for id in self.urls
            if self._missed[id] >= self._misses and now - self._answered[id] >= self._silence_s
        )

    def look(self, id: str, ask: Ask) -> None:
        """Ask one process once."""
        what = ask(self.urls[id])
        if what:
            self._what[id] = what
            self._missed[id] += 1
        else:
            self._missed[id] = 0
            self._answered[id] = self._clock()

    def _run(self, id: str) -> None:
        if self._ask is not None:
            self._loop(id, self._ask)
            return
        with self._open(self._timeout_s) as http:
            self._loop(id, lambda url: health(http, url))

    def _loop(self, id: str, ask: Ask) -> None:
        while not self._stop.is_set():
            self.look(id, ask)
            self._stop.wait(self._period_s)


def health(http: httpx.Client, url: str) -> str:
    """Empty when `url`/health answers, with whatever status below 500; else what came instead."""
    try:
        # A new connection every time: a process that accepts none is as deaf as one that does not answer.
        status = http.get(f"{url}/health", headers={"connection": "close"}).status_code
    except httpx.TimeoutException:
        return f"no answer to /health within {http.timeout.read:g} s"
    except httpx.HTTPError as error:
        return f"/health: {type(error).__name__}"
    return f"/health: HTTP {status}" if status >= 500 else ""
