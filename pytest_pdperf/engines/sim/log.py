"""Log lines in the shape of vLLM's, so that the same readers read them. The first one says SIMULATED."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from http import HTTPStatus

from .metrics import EngineMetrics

WINDOW_S = 10.0
_MIB = 1024.0 * 1024.0


class Log:
    """Writes whole lines, each at once, to one stream."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self._write = write or _stdout
        self._pid = os.getpid()

    def info(self, message: str) -> None:
        """A line of the engine."""
        self._line("INFO", message)

    def warning(self, message: str) -> None:
        """Something a user should see."""
        self._line("WARNING", message)

    def error(self, message: str) -> None:
        """What went wrong; the first one is the root cause."""
        self._line("ERROR", message)

    def access(self, peer: str, method: str, path: str, version: str, status: int) -> None:
        """An access line as uvicorn prints it."""
        try:
            phrase = HTTPStatus(status).phrase
        except ValueError:
            phrase = ""
        self._write(f'INFO:     {peer} - "{method} {path} HTTP/{version}" {status} {phrase}\n')

    def _line(self, level: str, message: str) -> None:
        stamp = time.strftime("%m-%d %H:%M:%S")
        self._write(f"(SimEngine pid={self._pid}) {level} {stamp} [sim.py:1] {message}\n")


def _stdout(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        pass  # A full disk or a closed pipe must not stop the engine.


class Windows:
    """The two lines that vLLM logs every ten seconds: throughput, and KV transfers if there were any."""

    def __init__(self, log: Log, metrics: EngineMetrics, state: Callable[[], tuple[int, int, float]]) -> None:
        self._log = log
        self._metrics = metrics
        self._state = state
        self._tokens = (0, 0, 0)
        self._quiet = True
        self._failed = (0, 0, 0)
        self.transfers: list[tuple[float, float, int, int]] = []
        """Since the last line: (transfer seconds, post seconds, bytes, descriptors)."""

    def tick(self) -> None:
        """End one window of WINDOW_S seconds."""
        m = self._metrics
        tokens = (m.by_source["local_compute"], m.generation_tokens, m.prompt_tokens)
        prompt = (tokens[0] - self._tokens[0]) / WINDOW_S
        generated = (tokens[1] - self._tokens[1]) / WINDOW_S
        active = tokens != self._tokens
        self._tokens = tokens
        running, waiting, usage = self._state()
        if active or running or waiting or not self._quiet:
            hits = 100.0 * m.external_hits / m.external_queries if m.external_queries else 0.0
            external = f", External prefix cache hit rate: {hits:.1f}%" if m.external_queries else ""
            self._log.info(
                f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, Avg generation throughput: "
                f"{generated:.1f} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, GPU KV cache usage: "
                f"{100.0 * usage:.1f}%, Prefix cache hit rate: 0.0%{external}"
            )
        self._quiet = not (active or running or waiting)
        self._transfers()

    def _transfers(self) -> None:
        m = self._metrics
        failed = (m.failed_transfers, m.kv_expired, m.notifications_after_expiry)
        new = [now - before for now, before in zip(failed, self._failed, strict=True)]
        rows, self.transfers, self._failed = self.transfers, [], failed
        if not rows and not any(new):
            return
        n = len(rows)
        times = sorted(row[0] * 1e3 for row in rows)
        posts = sorted(row[1] * 1e3 for row in rows)
        size = sum(row[2] for row in rows) / _MIB
        seconds = sum(times) / 1e3
        self._log.info(
            f"KV Transfer metrics: Num successful transfers={n}, Avg xfer time (ms)={_mean(times)}, "
            f"P90 xfer time (ms)={_p90(times)}, Avg post time (ms)={_mean(posts)}, P90 post time (ms)={_p90(posts)}, "
            f"Avg MB per transfer={round(size / n, 3) if n else 0}, "
            f"Throughput (MB/s)={round(size / seconds, 3) if seconds else 0}, "
            f"Avg number of descriptors={_mean([row[3] for row in rows])}, Num failed transfers={new[0]}, "
            f"Num KV expired reqs={new[1]}, Num notifs after expiry={new[2]}"
        )


def _mean(values: list[float] | list[int]) -> float:
    return round(sum(values) / len(values), 3) if values else 0


def _p90(ordered: list[float]) -> float:
    if not ordered:
        return 0
    place = 0.9 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return round(ordered[low] + (ordered[high] - ordered[low]) * (place - low), 3)
