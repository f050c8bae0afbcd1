"""Runs the pure models on the real clock: model time decides, the event loop only follows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .link import KvLink
from .scheduler import StepScheduler
from .sequence import Sequence, State, Step
from .timer import Timer


class Runner:
    """Wakes when the scheduler or the link has something due, and hands steps on when they are to be seen.

    Step ends come from the model. A late wake-up delays the bytes of that step and nothing after it.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        link: KvLink,
        *,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        on_step: Callable[[Step], None],
        on_transfer: Callable[[object, float], None],
    ) -> None:
        self.scheduler = scheduler
        self.link = link
        self.timer: Timer
        """Set by the owner before the first request; rings `wake`."""
        self._clock = clock
        self._jitter = jitter
        self._on_step = on_step
        self._on_transfer = on_transfer
        self._unseen: deque[tuple[float, Step]] = deque()
        self._seen_s = 0.0
        self._lag_s = jitter()
        """How long after its end the next step is to be seen; drawn ahead, so that one wake-up serves both."""
        self._wanting: deque[tuple[Sequence, Callable[[], None]]] = deque()

    def submit(self, seq: Sequence, at: float) -> None:
        """Put a sequence into the engine's queue at model time `at`."""
        self.scheduler.submit(seq, at)
        self._arm()

    def cancel(self, seq: Sequence) -> None:
        """Drop a sequence at once."""
        self._wanting = deque(item for item in self._wanting if item[0] is not seq)
        self.scheduler.cancel(seq, self._clock())
        self._grant()
        self._arm()

    def release(self, seq: Sequence) -> None:
        """Free the blocks of a held sequence."""
        self.scheduler.release(seq, self._clock())
        self._grant()
        self._arm()

    def reserve(self, seq: Sequence, granted: Callable[[], None]) -> None:
        """Call `granted` when blocks for arriving KV are reserved: now, or in order once some are free."""
        self._wanting.append((seq, granted))
        self._grant()

    @property
    def wanting(self) -> int:
        """Requests that wait for blocks to receive KV in."""
        return len(self._wanting)

    def start_transfer(self, key: object, size: float) -> float:
        """Put KV on the link; returns the moment it began."""
        now = self._clock()
        self._advance_link(now)
        self.link.start(key, size, now)
        self._arm()
        return now

    def cancel_transfer(self, key: object) -> None:
        """Take KV off the link."""
        self.link.cancel(key, self._clock())
        self._arm()

    def slow_link(self, factor: float) -> None:
        """Give the KV link `factor` times its bandwidth from now on."""
        now = self._clock()
        self._advance_link(now)
        self.link.slow(factor, now)
        self._arm()

    def wake(self) -> None:
        """Do everything that is due."""
        now = self._clock()
        for step in self.scheduler.advance(now):
            self._seen_s = max(self._seen_s, step.end_s + self._lag_s)
            self._lag_s = self._jitter()
            self._unseen.append((self._seen_s, step))
        while self._unseen and self._unseen[0][0] <= now:
            step = self._unseen.popleft()[1]
            self._on_step(step)
            if step.finished:
                self._grant()
        self._advance_link(now)
        self._arm()

    def _advance_link(self, now: float) -> None:
        for key, end in self.link.advance(now):
            self._on_transfer(key, end)

    def _grant(self) -> None:
        while self._wanting:
            seq, granted = self._wanting[0]
            if seq.state is State.NEW and not self.scheduler.reserve(seq):
                return
            self._wanting.popleft()
            granted()

    def _arm(self) -> None:
        due = self.link.next_time()
        step = self.scheduler.next_time()
        if step is not None and (due is None or step + self._lag_s < due):
            due = step + self._lag_s
        if self._unseen and (due is None or self._unseen[0][0] < due):
            due = self._unseen[0][0]
        self.timer.set(due)
