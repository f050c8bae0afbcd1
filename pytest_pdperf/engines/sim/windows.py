"""The two lines that vLLM logs every ten seconds: throughput, and KV transfers if there were any."""

from __future__ import annotations

from collections.abc import Callable

from .connector import Connector, Failures, Transfer
from .log import WINDOW_S, Log
from .metrics import EngineMetrics


class Windows:
    """What has changed since the last line, put into the words of the engine and of its connector."""

    def __init__(
        self,
        log: Log,
        metrics: EngineMetrics,
        state: Callable[[], tuple[int, int, float]],
        connector: Connector,
    ) -> None:
        self._log = log
        self._metrics = metrics
        self._state = state
        self._connector = connector
        self._tokens = (0, 0, 0)
        self._quiet = True
        self._failed = Failures()
        self.transfers: list[Transfer] = []
        """Since the last line."""

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
        failed = Failures(m.failed_transfers, m.kv_expired, m.notifications_after_expiry)
        new = Failures(*(now - before for now, before in zip(failed, self._failed, strict=True)))
        rows, self.transfers, self._failed = self.transfers, [], failed
        if (rows or new.any) and (line := self._connector.window(rows, new)) is not None:
            self._log.info(line)
