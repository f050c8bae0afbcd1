"""The clock of a cell: who sends when. Callbacks on one event loop, no coroutine between a stamp and the next
send.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .bodies import body_of, http_request
from .connection import Connection
from .exchange import End, Exchange
from .job import Job
from .loop_probe import LoopProbe
from .planned import Planned, StreamPlan
from .pool import Pool
from .progress import Gauge, Progress, ended_well
from .segments import TICK_S, LoopWatch
from .spool import Spool
from .stamps import Stamping

SWEEP_S = 0.05
PROGRESS_S = 0.5
SPARE = 16
"""Open connections that an open loop holds ready beyond those in use."""
SPIN_NS = 2_000_000
"""Below this much time to a due send the loop polls without sleeping: its timers count milliseconds."""


@dataclass(slots=True)
class Traffic:
    """A stream while it is being driven."""

    name: str
    queue: Sequence[Exchange]
    offsets: Sequence[float | None]
    clients: int | None
    """Closed loop with so many clients, None for an open loop."""
    think_s: float = 0.0
    next: int = 0
    in_flight: int = 0
    peak: int = 0
    done: int = 0


@dataclass(slots=True)
class Outcome:
    """What a drive leaves behind besides the exchanges' stamps and the spool."""

    exchanges: list[Exchange]
    started_ns: int = 0
    ended_ns: int = 0
    max_in_flight: int = 0
    reached: dict[str, int] = field(default_factory=dict)
    cpu_s: float = 0.0
    warnings: list[str] = field(default_factory=list)


class Drive:
    """Runs a job on an event loop: connect, warm up, measure."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        job: Job,
        spool: Spool,
        *,
        headers: tuple[tuple[str, str], ...] = (),
        on_progress: Callable[[Progress], None] | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._loop = loop
        self._job = job
        self._spool = spool
        self._clock = clock
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
        self._gave_up = False
        self._thinking = 0
        self._bug: BaseException | None = None
        self._start_s = 0.0
        self._start_cpu = 0.0
        self._sweeper: asyncio.TimerHandle | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._next_progress = 0.0
        self._warm = [self._exchanges(s, s.warmups, headers, True) for s in job.streams]
        self._cold = [self._exchanges(s, s.requests, headers, False) for s in job.streams]
        self.outcome = Outcome([e for group in (*self._warm, *self._cold) for e in group])

    def _loop_lag_ns(self) -> int:
        return self._probe.lag_ns if self._probe is not None else 0

    def _exchanges(
        self,
        stream: StreamPlan,
        requests: Sequence[Planned],
        headers: tuple[tuple[str, str], ...],
        warmup: bool,
    ) -> list[Exchange]:
        target = self._job.target
        made = []
        for index, request in enumerate(requests):
            request_id = f"{self._job.run_id}-{stream.name}-{'w' if warmup else ''}{index}"
            payload = http_request(body_of(request, target), target, request_id, headers)
            made.append(
                Exchange(
                    stream=stream.name,
                    index=index,
                    warmup=warmup,
                    input_tokens=len(request.prompt),
                    output_tokens=request.output_tokens,
                    request_id=request_id,
                    payload=payload,
                )
            )
        return made

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

    def _wanted(self) -> int:
        closed = sum(s.concurrency or 0 for s in self._job.streams)
        spare = min(SPARE, sum(len(s.requests) for s in self._job.streams if s.concurrency is None))
        return closed + spare

    def _warm_up(self) -> None:
        self._phase = "warm-up"
        traffic = [
            Traffic(s.name, queue, [None] * len(queue), min(len(queue), s.concurrency or 4))
            for s, queue in zip(self._job.streams, self._warm, strict=True)
            if queue
        ]
        self._drive(traffic, self._measure)

    def _measure(self) -> None:
        self._phase = "measure"
        self._gauge.restart()
        traffic = [
            Traffic(s.name, queue, [r.at_s for r in s.requests], s.concurrency, s.think_s)
            for s, queue in zip(self._job.streams, self._cold, strict=True)
        ]
        self.outcome.max_in_flight = 0
        self._start_cpu = time.process_time()
        self.outcome.started_ns = self._clock()
        self._drive(traffic, self._end)

    def _end(self) -> None:
        self.outcome.ended_ns = self._clock()
        self.outcome.cpu_s = time.process_time() - self._start_cpu
        self.outcome.reached = {t.name: t.peak for t in self._traffic}
        self._loop.stop()

    def _drive(self, traffic: list[Traffic], then: Callable[[], None]) -> None:
        self._traffic = traffic
        self._phase_over = then
        if not traffic:
            self._loop.call_soon(then)
            return
        self._set_spare()
        for stream in traffic:
            if stream.clients is None:
                self._schedule(stream, self._clock())
        for stream in traffic:
            for _ in range(stream.clients or 0):
                self._next(stream)

    def _set_spare(self) -> None:
        open_loop = sum(len(t.queue) - t.next for t in self._traffic if t.clients is None)
        fresh = 0 if self._job.target.keep_alive else sum(t.clients or 0 for t in self._traffic)
        self._pool.spare = min(SPARE, open_loop) + self._thinking + fresh

    # -- sending -----------------------------------------------------------------------------------

    def _schedule(self, stream: Traffic, origin_ns: int) -> None:
        """Open loop: send what is due, then wait for the next."""

        def due() -> None:
            while stream.next < len(stream.queue):
                due_ns = origin_ns + round((stream.offsets[stream.next] or 0.0) * 1e9)
                wait = due_ns - self._clock()
                if wait > 0:
                    if wait > SPIN_NS:
                        self._loop.call_later((wait - SPIN_NS) / 1e9, due)
                    else:
                        self._loop.call_soon(due)
                    return
                exchange = stream.queue[stream.next]
                exchange.due_ns = due_ns
                stream.next += 1
                self._start(exchange, stream)
            self._set_spare()

        due()

    def _next(self, stream: Traffic) -> None:
        """Closed loop: one client's next request."""
        if stream.next < len(stream.queue):
            exchange = stream.queue[stream.next]
            stream.next += 1
            self._start(exchange, stream)

    def _start(self, exchange: Exchange, stream: Traffic) -> None:
        if self._gave_up:
            why = f"not sent: {self._dead_in_a_row} requests in a row timed out or found no connection"
            self._loop.call_soon(self._not_sent, exchange, stream, End.NOT_SENT, why)
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
        self._pool.release(connection)
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
            self._gave_up = self._gave_up or self._dead_in_a_row >= max(4, 2 * clients)
        elif not bad:
            self._dead_in_a_row = 0
        self._spool.put(exchange)
        stream.done += 1
        if not bad:
            self._gauge.finished(exchange)
        if again is not None and stream.clients is not None:
            if stream.think_s and stream.next < len(stream.queue):
                self._thinking += 1
                self._set_spare()
                self._loop.call_later(stream.think_s, self._thought, stream)
            else:
                self._loop.call_soon(again, stream)
        if all(t.done == len(t.queue) for t in self._traffic):
            self._loop.call_soon(self._phase_over)

    def _thought(self, stream: Traffic) -> None:
        self._thinking -= 1
        self._next(stream)
        self._set_spare()

    # -- housekeeping ------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._watch.tick(self._clock())
        self._ticker = self._loop.call_later(TICK_S, self._tick)

    def _sweep(self) -> None:
        now = self._loop.time()
        limit = self._clock() - round(self._job.timeout_s * 1e9)
        late = [c for c, (exchange, _) in self._busy.items() if 0 < exchange.sent_ns < limit]
        for connection in late:
            connection.expire(f"no complete answer within {self._job.timeout_s:g} s")
        self._pool.sweep(now)
        if self._on_progress is not None and now >= self._next_progress:
            self._next_progress = now + PROGRESS_S
            self._on_progress(
                Progress(
                    phase=self._phase,
                    done=sum(t.done for t in self._traffic),
                    total=sum(len(t.queue) for t in self._traffic),
                    in_flight=self._in_flight,
                    failed=self._failed,
                    elapsed_s=round(now - self._start_s, 3),
                    tokens=self._gauge.tokens(exchange for exchange, _ in self._busy.values()),
                    ttft_ms=self._gauge.ttft_ms(),
                    itl_ms=self._gauge.itl_ms(),
                )
            )
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
