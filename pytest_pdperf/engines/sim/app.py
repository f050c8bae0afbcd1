"""A simulated engine as its clients see it: routes, the prefill and decode halves of a request, faults."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Coroutine
from random import Random

import orjson

from pytest_pdperf.spec.roles import Role

from .answer import Answer, damaged
from .connector import Parts, Transfer
from .connectors import CONNECTORS
from .faults import CHANCES, ROLES_OF_FAULT, Chance, Dice, Faults
from .http import Exchange
from .link import KvLink
from .log import Log
from .metrics import EngineCollector, EngineMetrics, exposition
from .profile import VERSION
from .request import Limits, Refused, Wanted, check_model, parse_object, parse_request, tokens_of
from .runner import Runner
from .scheduler import StepScheduler
from .sequence import Sequence, State, Step
from .settings import Settings
from .side_channel import KvLoadError
from .stream import AnswerHead, Api, error_body
from .tokens import kv_digest

_JITTER_SCALE = 1.45


class SimEngine:
    """One engine process without its sockets: takes exchanges and side-channel lines, answers them in model time."""

    def __init__(self, settings: Settings, log: Log, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.engine_id = str(uuid.UUID(int=Random(f"{settings.seed} id {time.time_ns()}").getrandbits(128)))
        self.metrics = EngineMetrics()
        self.log = log
        self._clock = clock
        profile = self._profile = settings.profile
        self.limits = Limits(settings.served_model, settings.max_model_len, profile.vocabulary)
        self.dies_at = settings.faults.die_after_tokens
        self._random = Random(settings.seed)
        noise = Random(f"{settings.seed} noise")
        scheduler = StepScheduler(
            profile,
            noise=lambda: 1.0 + abs(noise.gauss(0.0, profile.step_noise)),
            faults=settings.faults,
            max_seqs=settings.max_seqs,
            token_budget=settings.token_budget,
            kv_blocks=settings.kv_blocks,
            started_s=clock(),
        )
        sigma = _JITTER_SCALE * profile.jitter_s
        self.runner = Runner(
            scheduler,
            KvLink(profile.links[settings.link], settings.faults.link),
            clock=clock,
            jitter=lambda: abs(noise.gauss(0.0, sigma)),
            on_step=self._on_step,
            on_transfer=self._on_transfer,
        )
        self._dice = {
            name: Dice(self._chance(settings.faults, name), Random(f"{settings.seed} {name}"))
            for name in CHANCES
        }
        self.transfers: list[Transfer] = []
        """KV transfers that this engine counts, for the log window; the owner empties it."""
        self.connector = CONNECTORS[settings.connector](
            Parts(
                settings=settings,
                engine_id=self.engine_id,
                runner=self.runner,
                metrics=self.metrics,
                log=log,
                clock=clock,
                random=self._random,
                drop_transfer=self._dice["drop_transfer"],
                through=self.transfers.append,
            )
        )
        self._open: set[Answer] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        cache = {
            "block_size": str(profile.block_tokens),
            "num_gpu_blocks": str(settings.kv_blocks),
            "enable_prefix_caching": "False",
        }
        self._exposition = exposition(
            EngineCollector(
                self.metrics,
                model_name=settings.served_model,
                state=self.state,
                cache_config=cache,
                transfers=settings.role is not Role.SERVER and self.connector.prometheus,
                hit_source=self.connector.hit_source,
            )
        )

    def _chance(self, faults: Faults, fault: str) -> Chance:
        chance = getattr(faults, fault) if self.settings.role in ROLES_OF_FAULT[fault] else Chance()
        assert isinstance(chance, Chance)
        return chance

    def misbehave(self, faults: Faults) -> None:
        """From now on break in this way and no other; counts and times of a fault begin here.

        `slow_start` has no effect: the engine has started.
        """
        for name, dice in self._dice.items():
            dice.load(self._chance(faults, name))
        self.runner.scheduler.misbehave(faults, self._clock())
        self.runner.slow_link(faults.link)
        dies = faults.die_after_tokens
        self.dies_at = None if dies is None else self.metrics.generation_tokens + dies

    def state(self) -> tuple[int, int, float]:
        """Running requests, waiting requests, share of the KV cache in use."""
        scheduler = self.runner.scheduler
        return scheduler.running, scheduler.waiting + self.runner.wanting, scheduler.kv_usage

    # -- HTTP

    def handle(self, exchange: Exchange) -> None:
        """Answer one HTTP request."""
        try:
            self._route(exchange)
        except Refused as refused:
            body = error_body(refused.status, refused.message, refused.kind, refused.param)
            exchange.respond(refused.status, body)

    def _route(self, exchange: Exchange) -> None:
        method, path = exchange.method, exchange.path
        known = _ROUTES.get(path)
        if known is None:
            exchange.respond(404, b'{"detail":"Not Found"}')
        elif method != known:
            exchange.respond(405, b'{"detail":"Method Not Allowed"}')
        elif path == "/v1/completions":
            self._generate("completion", exchange)
        elif path == "/v1/chat/completions":
            self._generate("chat", exchange)
        elif path == "/tokenize":
            body = parse_object(bytes(exchange.body))
            check_model(body, self.limits)
            tokens = tokens_of(body, self.limits)
            exchange.respond(200, self._tokenized(tokens))
        elif path == "/metrics":
            exchange.respond(200, self._exposition(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/v1/models":
            exchange.respond(200, self._models())
        elif path == "/version":
            exchange.respond(200, orjson.dumps({"version": VERSION}))
        elif path == "/load":
            exchange.respond(200, orjson.dumps({"server_load": len(self._open)}))
        else:
            exchange.respond(200)

    def _tokenized(self, tokens: tuple[int, ...]) -> bytes:
        return orjson.dumps(
            {
                "count": len(tokens),
                "max_model_len": self.limits.max_model_len,
                "tokens": list(tokens),
                "token_strs": None,
            }
        )

    def _models(self) -> bytes:
        return orjson.dumps(
            {
                "object": "list",
                "data": [
                    {
                        "id": self.limits.served_model,
                        "object": "model",
                        "created": int(time.time()),
                        "owned_by": "pdperf-sim",
                        "root": self._profile.name,
                        "parent": None,
                        "max_model_len": self.limits.max_model_len,
                    }
                ],
            }
        )

    # -- a request

    def _generate(self, api: Api, exchange: Exchange) -> None:
        arrived = self._clock()
        wanted = parse_request(api, bytes(exchange.body), self.limits)
        prefix = "cmpl" if api == "completion" else "chatcmpl"
        given = exchange.headers.get("x-request-id") or f"{self._random.getrandbits(64):016x}"
        head = AnswerHead(
            api=api,
            id=f"{prefix}-{given}",
            created=int(time.time()),
            model=self.limits.served_model,
            prompt=wanted.prompt,
            return_token_ids=wanted.return_token_ids,
            include_usage=wanted.include_usage,
            continuous_usage=wanted.continuous_usage,
        )
        answer = Answer(exchange, wanted, head, self.metrics, arrived)
        answer.on_done = self._open.discard
        self._open.add(answer)
        exchange.on_close = lambda: self._abandoned(answer)
        if self._dice["short_output"].strikes():
            answer.shorten()
        answer.begin()
        role, connector = self.settings.role, self.connector
        if role is Role.DECODE and (offered := connector.offered(wanted)):
            self.metrics.external_queries += len(wanted.prompt)
            self._disaggregated(answer, wanted, offered)
            return
        if role is not Role.DECODE:
            answer.transfer_params = connector.kept
        hold = role is Role.PREFILL and connector.keeps(wanted.kv)
        self._local(answer, arrived + self._hop(self._profile.hop_s), hold=hold)

    def _hop(self, mean: float) -> float:
        spread = self._profile.hop_spread
        return mean * self._random.uniform(1.0 - spread, 1.0 + spread)

    def _local(self, answer: Answer, at: float, *, hold: bool = False) -> None:
        """Compute the prompt here."""
        answer.decide(kv_digest(answer.wanted.prompt), self.limits.vocabulary)
        self._submit(answer, self._sequence(answer, hold=hold), at)

    def _sequence(
        self, answer: Answer, *, kv_ready: bool = False, loaded: int = 0, hold: bool = False
    ) -> Sequence:
        leaks = self._dice["leak"].strikes()
        prompt = len(answer.wanted.prompt)
        answer.seq = Sequence(
            prompt,
            answer.length,
            kv_ready=kv_ready,
            loaded=loaded,
            hold=hold,
            leaks=leaks,
            payload=answer,
        )
        return answer.seq

    def _submit(self, answer: Answer, seq: Sequence, at: float) -> None:
        seq.max_tokens = answer.length
        if self._dice["error_in_stream"].strikes():
            answer.error_at = answer.length // 2
        self.runner.submit(seq, at)

    def _disaggregated(self, answer: Answer, wanted: Wanted, offered: int) -> None:
        """Get the KV from where the connector knows it to be, then decode."""
        if self._dice["recompute"].strikes():
            self._spawn(self._let_go(wanted, fetched=False))
            self._local(answer, self._clock() + self._hop(self._profile.pd_hop_s))
            return
        if offered < len(wanted.prompt):
            self._spawn(self._load(answer, self._sequence(answer, loaded=offered)))
            return
        seq = self._sequence(answer, kv_ready=True)
        self.runner.reserve(seq, lambda: self._spawn(self._load(answer, seq)))

    async def _load(self, answer: Answer, seq: Sequence) -> None:
        try:
            if self._dice["transfer_fail"].strikes():
                raise KvLoadError("simulated fault transfer_fail", peer_lost=False)
            pulled = await self.connector.fetch(answer.wanted)
        except KvLoadError as problem:
            self._load_failed(answer, seq, problem)
            return
        if seq.state is State.CANCELLED:
            self._spawn(self._let_go(answer.wanted, fetched=True))
            return
        answer.loaded = pulled.tokens
        self.metrics.external_hits += pulled.tokens
        corrupt = self._dice["corrupt"].strikes()
        answer.decide(
            damaged(pulled.digest, self._random) if corrupt else pulled.digest, self.limits.vocabulary
        )
        self._submit(answer, seq, pulled.ended_s + self._hop(self._profile.pd_hop_s))
        self._spawn(self._let_go(answer.wanted, fetched=True))

    def _load_failed(self, answer: Answer, seq: Sequence, problem: KvLoadError) -> None:
        line = self.connector.failed(answer.request_id, problem)
        if seq.state is State.CANCELLED:
            return
        self.log.error(line)
        self.runner.cancel(seq)
        if self.settings.recompute_on_failure:
            self._local(answer, self._clock())
        else:
            answer.fail()

    async def _let_go(self, wanted: Wanted, *, fetched: bool) -> None:
        try:
            await self.connector.let_go(wanted, fetched=fetched)
        except KvLoadError as problem:
            self.log.warning(f"KV that is not needed could not be given back: {problem}")

    def _abandoned(self, answer: Answer) -> None:
        """The client has left: stop computing, free the blocks."""
        if answer not in self._open:
            return
        self._open.discard(answer)
        self.metrics.finished["abort"] += 1
        if answer.seq is not None:
            self.runner.cancel(answer.seq)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_transfer(self, key: object, end_s: float) -> None:
        self.connector.transferred(key, end_s)

    # -- steps

    def _on_step(self, step: Step) -> None:
        """Write the tokens of one step: all its sequences together."""
        m = self.metrics
        before = m.generation_tokens
        later = 0
        for seq in step.emitted:
            answer = seq.payload
            assert isinstance(answer, Answer)
            if answer not in self._open:
                continue
            position = step.number - seq.first_step
            m.generation_tokens += 1
            later += position > 0
            if position == answer.error_at:
                self.runner.cancel(seq)
                answer.fail()
            else:
                answer.token(position, step.end_s)
        if later:
            m.inter_token.observe(step.end_s - step.start_s, later)
        m.iteration_tokens.observe(step.prefill_tokens + step.decoding)
        if self.dies_at is not None and before < self.dies_at <= m.generation_tokens:
            self.log.error(f"simulated fault: die_after_tokens={self.dies_at} reached, exiting hard")
            # One round later, so that this step's tokens are on the wire.
            asyncio.get_running_loop().call_later(0.002, os._exit, 1)


_ROUTES = {
    **dict.fromkeys(("/health", "/ping", "/v1/models", "/version", "/load", "/metrics"), "GET"),
    **dict.fromkeys(("/v1/completions", "/v1/chat/completions", "/tokenize"), "POST"),
}
