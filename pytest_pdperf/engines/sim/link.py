"""The KV link of one prefill engine: who gets how much of it, and when each transfer is through."""

from __future__ import annotations

from collections import deque

from .profile import Link

_SAME_TIME_BYTES = 1.0
"""Transfers this close to the one that ends have ended with it: a clock reading carries that much rounding."""


class KvLink:
    """Shares one link among transfers on any clock: the owner says what time it is and gets back what ended.

    Pure: no timers, no sockets. `lanes` transfers run at once and share the rate equally, later ones wait in order.
    """

    def __init__(self, link: Link, factor: float = 1.0) -> None:
        self._link = link
        self._factor = factor
        self._active: dict[object, float] = {}
        self._queue: deque[tuple[object, float]] = deque()
        self._now = 0.0

    def slow(self, factor: float, now: float) -> None:
        """From `now` on the link has `factor` times its bandwidth."""
        self._drain(now)
        self._factor = factor

    @property
    def outstanding(self) -> int:
        """Transfers begun or waiting."""
        return len(self._active) + len(self._queue)

    def start(self, key: object, size: float, now: float) -> None:
        """Begin a transfer of `size` bytes at `now`; `advance` must have been called for every earlier end."""
        if key in self._active or any(key == waiting for waiting, _ in self._queue):
            raise ValueError(f"transfer {key!r} is already on the link")
        self._drain(now)
        if len(self._active) < self._link.lanes:
            self._active[key] = float(size)
        else:
            self._queue.append((key, float(size)))

    def cancel(self, key: object, now: float) -> None:
        """Forget a transfer; unknown keys are ignored."""
        self._drain(now)
        if self._active.pop(key, None) is None:
            self._queue = deque(item for item in self._queue if item[0] != key)
        self._fill()

    def next_time(self) -> float | None:
        """When the next transfer ends if nothing else happens; None when the link is idle."""
        if not self._active:
            return None
        return self._now + min(self._active.values()) / self._lane_rate()

    def advance(self, now: float) -> list[tuple[object, float]]:
        """Let time pass to `now`; the transfers that ended with the moment each did, in order."""
        ended: list[tuple[object, float]] = []
        while (end := self.next_time()) is not None and end <= now:
            least = min(self._active.values())
            through = [key for key, left in self._active.items() if left <= least + _SAME_TIME_BYTES]
            self._drain(end)
            for key in through:
                del self._active[key]
                ended.append((key, end))
            self._fill()
        self._drain(now)
        return ended

    def _lane_rate(self) -> float:
        return self._factor * self._link.rate(self.outstanding) / len(self._active)

    def _drain(self, now: float) -> None:
        if now <= self._now:
            return
        if self._active:
            moved = (now - self._now) * self._lane_rate()
            for key in self._active:
                self._active[key] -= moved
        self._now = now

    def _fill(self) -> None:
        while self._queue and len(self._active) < self._link.lanes:
            key, size = self._queue.popleft()
            self._active[key] = size
