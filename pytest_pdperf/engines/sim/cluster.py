"""A whole serving system on a virtual clock: thousands of simulated runs where real processes would take days."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import NamedTuple

import numpy as np

from pytest_pdperf.spec.roles import Kind, Role

from .faults import Dice, Faults
from .link import KvLink
from .profile import Profile, link_named
from .scheduler import StepScheduler
from .sequence import Sequence as EngineSequence
from .sequence import Step
from .traffic import RequestTimes, Traffic

_NOISE_BATCH = 4096
_JITTER_SCALE = 1.45


@dataclass(frozen=True, slots=True)
class Deployment:
    """What stands behind the router, and how the router picks."""

    kind: Kind
    n_prefill: int = 1
    n_decode: int = 2
    n_server: int = 3
    transport: str = "auto"
    policy: str = "round_robin"
    """`round_robin`, or `herd`: what the published runs' router was fitted to."""
    herd: float = 0.85
    """Probability that a pick follows the one before it made less than `herd_window_s` ago."""
    herd_window_s: float = 0.0532


class _Request:
    __slots__ = ("client", "engine", "index", "local", "prompt", "sent_s", "stream")

    def __init__(self, stream: int, index: int, client: int, prompt: int, sent_s: float) -> None:
        self.stream = stream
        self.index = index
        self.client = client
        self.prompt = prompt
        self.sent_s = sent_s
        self.engine: _Engine
        self.local = False


class _Transfer(NamedTuple):
    """KV on its way: what it leaves, and whom it makes ready to decode."""

    prefill: _Engine
    held: EngineSequence
    engine: _Engine
    seq: EngineSequence


class _Engine:
    """One scheduler with the history of its step ends, from which every request's token times are cut."""

    __slots__ = ("ends", "faults", "leak", "name", "open", "recompute", "role", "scheduler", "transfer_fail")

    def __init__(self, name: str, role: Role, profile: Profile, faults: Faults, seed: int) -> None:
        self.name = name
        self.role = role
        self.faults = faults
        self.scheduler = StepScheduler(profile, noise=_noise(profile, seed), faults=faults)
        self.ends: list[float] = []
        self.open = 0
        self.leak = Dice(faults.leak, Random(seed))
        self.recompute = Dice(faults.recompute, Random(seed + 1))
        self.transfer_fail = Dice(faults.transfer_fail, Random(seed + 2))


def _noise(profile: Profile, seed: int) -> Callable[[], float]:
    def draws() -> Iterator[float]:
        rng = np.random.default_rng(seed)
        while True:
            yield from (1.0 + np.abs(rng.standard_normal(_NOISE_BATCH) * profile.step_noise)).tolist()

    return draws().__next__


def faults_of(faults: Faults | Mapping[str, Faults], name: str, role: Role) -> Faults:
    """The faults of one engine: one set for all, or a table by instance id (`decode-0`) or role (`decode`)."""
    if isinstance(faults, Faults):
        return faults
    return faults.get(name) or faults.get(role.value) or Faults()


class Cluster:
    """Engines, links, router and clients of one run, driven by one event queue."""

    def __init__(
        self,
        profile: Profile,
        deployment: Deployment,
        streams: Sequence[Traffic],
        *,
        seed: int,
        faults: Faults | Mapping[str, Faults] | None = None,
    ) -> None:
        self._profile = profile
        self._deployment = deployment
        self._streams = streams
        self._random = Random(seed)
        self._jitter = np.random.default_rng(seed)
        self._pd = deployment.kind is Kind.PD
        given: Faults | Mapping[str, Faults] = Faults() if faults is None else faults
        roles = (
            ((Role.PREFILL, deployment.n_prefill), (Role.DECODE, deployment.n_decode))
            if self._pd
            else ((Role.SERVER, deployment.n_server),)
        )
        made = {
            role: [
                _Engine(
                    f"{role.value}-{i}",
                    role,
                    profile,
                    faults_of(given, f"{role.value}-{i}", role),
                    self._random.randrange(2**32),
                )
                for i in range(copies)
            ]
            for role, copies in roles
        }
        self._prefills = made.get(Role.PREFILL, [])
        self._decodes = made.get(Role.DECODE) or made[Role.SERVER]
        self._engines = [*self._prefills, *self._decodes]
        link = profile.links[link_named(profile, deployment.transport)] if self._pd else None
        self._links = [KvLink(link, engine.faults.link) for engine in self._prefills] if link else []
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._issued = [0] * len(streams)
        self._turn = 0
        self._prefill_turn = 0
        self._last_pick = (-1e9, 0)
        self._done: list[RequestTimes] = []
        self._unreserved: list[tuple[int, _Transfer]] = []

    def run(self) -> list[RequestTimes]:
        """Serve every request and hand back their times, by stream and index."""
        for number, traffic in enumerate(self._streams):
            for client in range(min(traffic.concurrency, traffic.requests)):
                self._send(number, client, self._random.random() * traffic.start_spread_s)
        total = sum(traffic.requests for traffic in self._streams)
        while len(self._done) < total:
            self._tick()
        order = {traffic.name: i for i, traffic in enumerate(self._streams)}
        return sorted(self._done, key=lambda r: (order[r.stream], r.index))

    # -- the event loop

    def _tick(self) -> None:
        """Handle the earliest thing due: an event, a transfer, or one engine for as long as nothing can meddle."""
        limit = self._heap[0][0] if self._heap else float("inf")
        link: KvLink | None = None
        for each in self._links:
            due = each.next_time()
            if due is not None and due < limit:
                limit, link = due, each
        engine: _Engine | None = None
        first = limit
        for candidate in self._engines:
            due = candidate.scheduler.next_time()
            if due is not None and due < first:
                first, engine = due, candidate
        if engine is not None:
            others = [other.scheduler.quiet_until() for other in self._engines if other is not engine]
            self._run_engine(engine, min(limit, *others) if others else limit)
        elif link is not None:
            for key, end in link.advance(limit):
                self._transferred(key, end)
        elif self._heap:
            due, _, action = heapq.heappop(self._heap)
            action(due)
        else:
            raise RuntimeError("requests are open but nothing is going to happen: not enough KV blocks?")

    def _run_engine(self, engine: _Engine, limit: float) -> None:
        scheduler = engine.scheduler
        ends = engine.ends
        due = scheduler.next_time()
        while due is not None and due <= limit:
            if scheduler.skip(limit, ends):
                due = scheduler.next_time()
                continue
            for step in scheduler.advance(due):
                ends.append(step.end_s)
                if step.finished:
                    self._finished(engine, step)
                    return
            due = scheduler.next_time()

    def _at(self, when: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), action))

    # -- the path of a request

    def _send(self, stream: int, client: int, now: float) -> None:
        traffic = self._streams[stream]
        index = self._issued[stream]
        if index == traffic.requests:
            return
        self._issued[stream] = index + 1
        request = _Request(stream, index, client, self._length(traffic), now)
        self._at(now + self._hop(self._profile.hop_s), lambda due: self._arrive(request, due))

    def _length(self, traffic: Traffic) -> int:
        low, high = traffic.input_tokens
        length = float(low) if low == high else self._random.randint(low, high)
        if traffic.length_sigma:
            length *= self._random.gauss(1.0, traffic.length_sigma)
        return max(1, round(length))

    def _hop(self, mean: float) -> float:
        spread = self._profile.hop_spread
        return mean * self._random.uniform(1.0 - spread, 1.0 + spread)

    def _pick(self, now: float) -> _Engine:
        engines = self._decodes
        if self._deployment.policy == "round_robin":
            self._turn += 1
            return engines[(self._turn - 1) % len(engines)]
        then, last = self._last_pick
        if now - then < self._deployment.herd_window_s and self._random.random() < self._deployment.herd:
            choice = last
        else:
            one, other = self._random.sample(range(len(engines)), 2) if len(engines) > 1 else (0, 0)
            choice = one if engines[one].open <= engines[other].open else other
        self._last_pick = (now, choice)
        return engines[choice]

    def _arrive(self, request: _Request, now: float) -> None:
        engine = request.engine = self._pick(now)
        engine.open += 1
        output = self._streams[request.stream].output_tokens
        if not self._pd:
            request.local = True
            seq = EngineSequence(request.prompt, output, leaks=engine.leak.strikes(), payload=request)
            engine.scheduler.submit(seq, now)
            return
        prefill = self._prefills[self._prefill_turn % len(self._prefills)]
        self._prefill_turn += 1
        seq = EngineSequence(request.prompt, 1, hold=True, leaks=prefill.leak.strikes(), payload=request)
        prefill.scheduler.submit(seq, now)

    def _finished(self, engine: _Engine, step: Step) -> None:
        for seq in step.finished:
            request = seq.payload
            assert isinstance(request, _Request)
            if engine.role is Role.PREFILL:
                self._prefilled(engine, request, seq, step.end_s)
            else:
                self._answered(engine, request, seq)
        if self._unreserved:
            waiting, self._unreserved = self._unreserved, []
            for link, transfer in waiting:
                self._fetch(link, transfer, step.end_s)

    def _prefilled(self, prefill: _Engine, request: _Request, held: EngineSequence, now: float) -> None:
        engine = request.engine
        if engine.transfer_fail.strikes():
            prefill.scheduler.release(held, now)
            self._close(engine, request, (), now, failed=True)
        elif engine.recompute.strikes():
            prefill.scheduler.release(held, now)
            request.local = True
            output = self._streams[request.stream].output_tokens
            seq = EngineSequence(request.prompt, output, leaks=engine.leak.strikes(), payload=request)
            at = now + self._hop(self._profile.pd_hop_s)
            self._at(at, lambda due: engine.scheduler.submit(seq, due))
        else:
            output = self._streams[request.stream].output_tokens
            leaks = engine.leak.strikes()
            seq = EngineSequence(request.prompt, output, kv_ready=True, leaks=leaks, payload=request)
            self._fetch(self._prefills.index(prefill), _Transfer(prefill, held, engine, seq), now)

    def _fetch(self, link: int, transfer: _Transfer, now: float) -> None:
        """Put KV on the link once the decode engine has blocks for it."""
        if not transfer.engine.scheduler.reserve(transfer.seq):
            self._unreserved.append((link, transfer))
            return
        size = transfer.seq.prompt_tokens * self._profile.kv_bytes_per_token
        self._links[link].start(transfer, size, now)

    def _transferred(self, key: object, now: float) -> None:
        assert isinstance(key, _Transfer)
        key.prefill.scheduler.release(key.held, now)
        self._at(
            now + self._hop(self._profile.pd_hop_s), lambda due: key.engine.scheduler.submit(key.seq, due)
        )

    def _answered(self, engine: _Engine, request: _Request, seq: EngineSequence) -> None:
        ends = np.array(engine.ends[seq.first_step : seq.first_step + seq.max_tokens])
        sigma = _JITTER_SCALE * self._profile.jitter_s
        ends += np.abs(self._jitter.standard_normal(len(ends))) * sigma
        times = tuple(np.maximum.accumulate(ends).tolist())
        self._close(engine, request, times, times[-1], failed=False)

    def _close(
        self, engine: _Engine, request: _Request, times: tuple[float, ...], now: float, *, failed: bool
    ) -> None:
        engine.open -= 1
        traffic = self._streams[request.stream]
        self._done.append(
            RequestTimes(
                stream=traffic.name,
                index=request.index,
                prompt_tokens=request.prompt,
                output_tokens=len(times),
                engine=engine.name,
                sent_s=request.sent_s,
                token_s=times,
                failed=failed,
                local_prefill=request.local,
            )
        )
        spread = traffic.think_spread
        think = traffic.think_s * self._random.uniform(1.0 - spread, 1.0 + spread)
        self._at(now + think, lambda due: self._send(request.stream, request.client, due))


def simulate(
    profile: Profile,
    deployment: Deployment,
    streams: Sequence[Traffic],
    *,
    seed: int,
    faults: Faults | Mapping[str, Faults] | None = None,
    launch_sigma: float = 0.0,
) -> list[RequestTimes]:
    """Times of every request of one run, by stream and index; equal arguments give equal results.

    `launch_sigma` makes launches differ: all the machine's durations are multiplied by one factor exp(N(0, sigma))
    drawn from the seed. Of the faults, those about timing, blocks, recomputing and failed transfers act here; the ones
    about processes and bytes (die_after_tokens, error_in_stream, drop_transfer, ...) need the real server.
    """
    if launch_sigma:
        profile = profile.slowed(float(np.exp(Random(f"launch {seed}").gauss(0.0, launch_sigma))))
    return Cluster(profile, deployment, streams, seed=seed, faults=faults).run()


def simulate_cell(
    profile: Profile,
    kind: Kind,
    *,
    input_tokens: int | tuple[int, int],
    output_tokens: int,
    concurrency: int,
    requests: int,
    seed: int,
    n_prefill: int = 1,
    n_decode: int = 2,
    n_server: int = 3,
    transport: str = "auto",
    policy: str = "round_robin",
    think_s: float = 0.0,
    faults: Faults | Mapping[str, Faults] | None = None,
    launch_sigma: float = 0.0,
) -> list[RequestTimes]:
    """Times of every request of one closed-loop cell with a single stream; see `simulate`."""
    lengths = (input_tokens, input_tokens) if isinstance(input_tokens, int) else input_tokens
    traffic = Traffic(lengths, output_tokens, requests=requests, concurrency=concurrency, think_s=think_s)
    deployment = Deployment(
        kind, n_prefill=n_prefill, n_decode=n_decode, n_server=n_server, transport=transport, policy=policy
    )
    return simulate(profile, deployment, [traffic], seed=seed, faults=faults, launch_sigma=launch_sigma)
