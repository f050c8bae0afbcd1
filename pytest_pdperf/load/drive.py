"""The clock of a cell: who sends when. Callbacks on one event loop, no coroutine between a stamp and the next
send.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .connection import Connection
from .exchange import End, Exchange
from .job import Job
from .loop_probe import LoopProbe
from .planned import StreamPlan
from .pool import Pool
from .prepare import exchanges_of
from .progress import Gauge, Progress, ended_well
from .segments import TICK_S, LoopWatch
from .shares import Share, Tickets, Turns
from .spool import Spool
from .stamps import Stamping
from .traffic import Traffic

SWEEP_S = 0.05
PROGRESS_S = 0.5
SPOOL_NS = 200_000
"""How long bodies of finished answers may be written at a time, every `TICK_S`."""
SPARE = 16
"""Open connections that an open loop holds ready beyond those in use."""
SPIN_NS = 2_000_000
"""Below this much time to a due send the loop polls without sleeping: its timers count milliseconds."""


@dataclass(slots=True)
class Outcome:
    """What a drive leaves behind besides the exchanges' stamps and the spool."""

    exchanges: list[Exchange] = field(default_factory=list)
    started_ns: int = 0
    ended_ns: int = 0
    max_in_flight: int = 0
    reached: dict[str, int] = field(default_factory=dict)
    cpu_s: float = 0.0
    clock_step_ns: int = 0
    warnings: list[str] = field(default_factory=list)


Go = Callable[[int], None]
"""Called with the moment (ns) at which the clock of the cell starts."""


class Drive:
    """Runs a job, or one process's share of it, on an event loop: connect, warm up, measure.

    `hold` is called after the warm-up with what starts the clock, for processes that start together; without it the
    clock starts at once. `stop_asked` is looked at all the time; see `stop`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        job: Job,
        spool: Spool,
        *,
        headers: tuple[tuple[str, str], ...] = (),
        on_progress: Callable[[Progress], None] | None = None,
        clock: Callable[[], int] = time.time_ns,
        share: Share = Share(),  # noqa: B008 - frozen
        hold: Callable[[Go], None] | None = None,
        stop_asked: Callable[[], bool] = bool,
    ) -> None:
        self._loop = loop
        self._job = job
        self._spool = spool
        self._clock = clock
        self._share = share
        self._hold = hold
        self._stop_asked = stop_asked
        self._on_progress = on_progress
        self._probe = LoopProbe(loop, clock=clock) if job.target.tls else None
        self._watch = LoopWatch()
        self._gauge = Gauge()
        self._pool = Pool(loop, job.target, self._finished, clock, self._loop_lag_ns, self._watch)
        self._busy: dict[Connection, tuple[Exchange, Traffic]] = {}
        self._traffic: list[Traffic] = []
        self._phase = "connect"
        self._phase_over: Callable[[], None] = lambda: None
        self._in_flight = 0
        self._failed = 0
        self._dead_in_a_row = 0
        self._gave_up = ""
        self._stopped = False
        self._thinking = 0
        self._bug: BaseException | None = None
        self._start_s = 0.0
        self._start_cpu = 0.0
        self._sweeper: asyncio.TimerHandle | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._warmed: list[Traffic] = []
        self._next_progress = 0.0
        dealt = 0
        self._plans: list[tuple[StreamPlan, int | None]] = []
        """Every stream with this process's clients of it."""
        for stream in job.streams:
            self._plans.append((stream, share.clients(stream, dealt)))
            dealt += stream.concurrency or 0
        self._warm = [
            exchanges_of(job, s, share.dealt(len(s.warmups)), headers, warmup=True) for s in job.streams
        ]
        self._cold = [exchanges_of(job, s, self._positions(s, n), headers) for s, n in self._plans]
        self.outcome = Outcome()

    def _positions(self, stream: StreamPlan, clients: int | None) -> Sequence[int]:
        """Measured requests that this process may have to send."""
        if clients is None:
            return self._share.dealt(len(stream.requests))
        return range(len(stream.requests) if clients else 0)

    def _loop_lag_ns(self) -> int:
        return self._probe.lag_ns if self._probe is not None else 0

    # -- phases ------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Drive the job to its end; every request is recorded, whatever became of it."""
        with Stamping():
            self._start_s = self._loop.time()
            self._sweep()
            self._tick()
            self._pool.prepare(self._wanted(), self._warm_up)
            self._loop.set_exception_handler(self._broken)
            try:
                self._loop.run_forever()
            finally:
                for timer in (self._sweeper, self._ticker):
                    if timer is not None:
                        timer.cancel()
                if self._probe is not None:
                    self._probe.close()
                self._pool.close()
        if self._bug is not None:
            raise self._bug
        return self.outcome

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: end the run with that error, since requests may otherwise wait for ever."""
        self._bug = self._bug or context.get("exception") or RuntimeError(context.get("message"))
        loop.stop()

    def stop(self) -> None:
        """End early: open requests are recorded as they are, no further one is sent."""
        self._stopped = True
        for traffic in self._traffic:
            traffic.dry = True
        for connection in list(self._busy):
            connection.expire("the run was stopped before the answer was whole")
        if self._phase == "ready":
            self._measure(self._clock())
        self._check_over()

    def _wanted(self) -> int:
        closed = sum(clients or 0 for _, clients in self._plans)
        waiting = sum(
            len(queue) for (_, clients), queue in zip(self._plans, self._cold, strict=True) if clients is None
        )
        return closed + min(SPARE, waiting)

    def _warm_up(self) -> None:
        self._phase = "warm-up"
        traffic = [
            Traffic(s.name, queue, Turns(queue), min(len(queue), clients or 4))
            for (s, clients), queue in zip(self._plans, self._warm, strict=True)
            if queue
        ]
        self._drive(traffic, self._ready)

    def _ready(self) -> None:
        """Warm; the connections are kept fresh until the clock starts."""
        self._warmed = self._traffic
        if self._hold is None or self._stopped:
            self._measure(self._clock())
            return
        self._phase = "ready"
        self._traffic = []
        self._pool.spare = self._wanted()
        self._tell(self._loop.time())
        self._hold(self._start_at)

    def _start_at(self, origin_ns: int) -> None:
        """Let the clock start at `origin_ns`."""
        if self._phase != "ready":
            return
        wait = origin_ns - self._clock()
        if wait > SPIN_NS:
            self._loop.call_later((wait - SPIN_NS) / 1e9, self._start_at, origin_ns)
        elif wait > 0:
            self._loop.call_soon(self._start_at, origin_ns)
        else:
            self._measure(origin_ns)

    def _measure(self, origin_ns: int) -> None:
        self._phase = "measure"
        self._gauge.restart()
        traffic = [
            Traffic(
                s.name,
                queue,
                Tickets(self._share.tickets[s.name])
                if clients is not None and s.name in self._share.tickets
                else Turns(queue),
                clients,
                [r.at_s for r in s.requests],
                s.think_s,
            )
            for (s, clients), queue in zip(self._plans, self._cold, strict=True)
            if queue
        ]
        self.outcome.max_in_flight = 0
        self._start_cpu = time.process_time()
        self.outcome.started_ns = origin_ns
        self._drive(traffic, self._end)

    def _end(self) -> None:
        self.outcome.ended_ns = self._clock()
        self.outcome.cpu_s = time.process_time() - self._start_cpu
        self.outcome.reached = {t.name: t.peak for t in self._traffic}
        self._spool.write()
        for phase in (self._warmed, self._traffic):
            for traffic in phase:
                tried = [e for e in traffic.taken if e.end is not End.OPEN]
                self.outcome.exchanges += sorted(tried, key=lambda e: e.index)
        self._loop.stop()

    def _drive(self, traffic: list[Traffic], then: Callable[[], None]) -> None:
        self._traffic = traffic
        self._phase_over = then
        for stream in traffic:
            stream.dry = self._stopped
        self._set_spare()
        for stream in traffic:
            if stream.clients is None:
                self._schedule(stream, self.outcome.started_ns)
        for stream in traffic:
            for _ in range(stream.clients or 0):
                self._next(stream)
        self._check_over()

    def _set_spare(self) -> None:
        open_loop = sum(t.left for t in self._traffic if t.clients is None)
        fresh = 0 if self._pool.reuses else sum(t.clients or 0 for t in self._traffic)
        self._pool.spare = min(SPARE, open_loop) + self._thinking + fresh

    # -- sending -----------------------------------------------------------------------------------

    def _schedule(self, stream: Traffic, origin_ns: int) -> None:
        """Open loop: send what is due, then wait for the next."""

        def due(exchange: Exchange | None) -> None:
            while exchange is not None and not self._stopped:
                due_ns = origin_ns + round((stream.offsets[exchange.index] or 0.0) * 1e9)
                wait = due_ns - self._clock()
                if wait > 0:
                    if wait > SPIN_NS:
                        self._loop.call_later((wait - SPIN_NS) / 1e9, due, exchange)
                    else:
                        self._loop.call_soon(due, exchange)
                    return
                exchange.due_ns = due_ns
                self._start(exchange, stream)
                exchange = stream.take()
            self._set_spare()
            self._check_over()

        due(stream.take())

    def _next(self, stream: Traffic) -> None:
        """Closed loop: one client's next request."""
        exchange = stream.take()
        if exchange is not None:
            self._start(exchange, stream)
        else:
            self._check_over()

    def _start(self, exchange: Exchange, stream: Traffic) -> None:
        if self._gave_up:
            self._loop.call_soon(self._not_sent, exchange, stream, End.NOT_SENT, f"not sent: {self._gave_up}")
            return

        def ready(connection: Connection | None, error: str) -> None:
            if connection is None:
                self._loop.call_soon(
                    self._not_sent, exchange, stream, End.CONNECT, f"cannot connect: {error}"
                )
                return
            self._in_flight += 1
            stream.in_flight += 1
            stream.peak = max(stream.peak, stream.in_flight)
            self.outcome.max_in_flight = max(self.outcome.max_in_flight, self._in_flight)
            self._busy[connection] = (exchange, stream)
            connection.send(exchange)

        self._pool.acquire(ready)

    def _not_sent(self, exchange: Exchange, stream: Traffic, end: End, why: str) -> None:
        exchange.end = end
        exchange.error = why
        exchange.sent_ns = exchange.end_ns = self._clock()
        self._account(exchange, stream, again=self._next)

    # -- finishing ---------------------------------------------------------------------------------

    def _finished(self, connection: Connection, exchange: Exchange) -> None:
        _, stream = self._busy.pop(connection)
        self._in_flight -= 1
        stream.in_flight -= 1
        self._pool.release(connection, exchange)
        if exchange.end is End.COMPLETE and not stream.think_s:
            if stream.clients is not None:
                self._next(stream)
            self._account(exchange, stream, again=None)
        else:
            self._account(exchange, stream, again=self._next)

    def _account(self, exchange: Exchange, stream: Traffic, again: Callable[[Traffic], None] | None) -> None:
        """Store a finished exchange; let its client go on unless it already has."""
        bad = not ended_well(exchange)
        self._failed += bad
        if exchange.end in (End.TIMEOUT, End.CONNECT):
            self._dead_in_a_row += 1
            clients = sum(t.clients or SPARE for t in self._traffic)
            if self._dead_in_a_row >= max(4, 2 * clients):
                self._gave_up = f"{self._dead_in_a_row} requests in a row timed out or found no connection"
        elif not bad:
            self._dead_in_a_row = 0
        self._spool.put(exchange)
        stream.done += 1
        if not bad:
            self._gauge.finished(exchange)
        if again is not None and stream.clients is not None:
            if stream.think_s and (following := stream.take()) is not None:
                self._thinking += 1
                self._set_spare()
                self._loop.call_later(stream.think_s, self._thought, following, stream)
            elif not stream.think_s:
                self._loop.call_soon(again, stream)
        self._check_over()

    def _thought(self, exchange: Exchange, stream: Traffic) -> None:
        self._thinking -= 1
        if not self._stopped:
            self._start(exchange, stream)
            self._set_spare()

    def _check_over(self) -> None:
        """Go on to the next phase, once, when every stream is over."""
        if all(t.over or (self._stopped and not t.in_flight) for t in self._traffic):
            then, self._phase_over = self._phase_over, lambda: None
            self._loop.call_soon(then)

    # -- housekeeping ------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._watch.tick(self._clock())
        self._spool.write(SPOOL_NS)
        self._ticker = self._loop.call_later(TICK_S, self._tick)

    def _sweep(self) -> None:
        if not self._stopped and self._stop_asked():
            self.stop()
        now = self._loop.time()
        limit = self._clock() - round(self._job.timeout_s * 1e9)
        late = [c for c, (exchange, _) in self._busy.items() if 0 < exchange.sent_ns < limit]
        for connection in late:
            connection.expire(f"no complete answer within {self._job.timeout_s:g} s")
        self._pool.sweep(now)
        if now >= self._next_progress:
            self._tell(now)
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    def _tell(self, now: float) -> None:
        self._next_progress = now + PROGRESS_S
        if self._on_progress is not None:
            self._on_progress(
                Progress(
                    phase=self._phase,
                    done=sum(t.done for t in self._traffic),
                    total=sum(len(t.taken) + t.left for t in self._traffic),
                    in_flight=self._in_flight,
                    failed=self._failed,
                    elapsed_s=round(now - self._start_s, 3),
                    tokens=self._gauge.tokens(exchange for exchange, _ in self._busy.values()),
                    ttft_ms=self._gauge.ttft_ms(),
                    itl_ms=self._gauge.itl_ms(),
                )
            )
