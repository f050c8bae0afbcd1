"""A simulated SGLang engine as its clients see it: its routes, and the two legs of a disaggregated request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from pytest_pdperf.spec.roles import Role

from .answer import Answer, damaged
from .app import SimEngine
from .connector import call_later
from .http import Exchange
from .log import Log
from .request import Refused, parse_object, parse_request
from .sequence import Sequence, State, Step
from .settings import Settings
from .sglang_answer import SglangAnswer
from .sglang_info import loads, model_info, old_loads, server_info
from .sglang_leg import PrefillLeg
from .sglang_metrics import Levels, SglangCollector, SglangMetrics, exposition
from .sglang_rooms import Rooms, RoomTaken
from .sglang_wire import (
    Bootstrap,
    GenerateWriter,
    OpenAiWriter,
    Route,
    bootstrap_of,
    parse_generate,
    refusal_body,
)
from .side_channel import KvLoadError, PrefillPeers
from .stream import AnswerHead

_DECODE_LOG_STEPS = 40
_ROUTES: dict[str, Route] = {
    "/generate": "generate",
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What an SGLang process is told beyond what every simulated engine is told."""

    incremental: bool = False
    """Events of `/generate` carry what is new, not all so far (`--incremental-streaming-output`)."""
    old_metrics: bool = False


class SglangEngine(SimEngine):
    """One SGLang process without its sockets, on the same timing model as every simulated engine."""

    metrics: SglangMetrics

    def __init__(
        self,
        settings: Settings,
        log: Log,
        *,
        dialect: Dialect | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(settings, log, clock=clock)
        self._dialect = dialect or Dialect()
        self.metrics = SglangMetrics()
        self.rooms = Rooms(
            self.runner,
            bytes_per_token=settings.profile.kv_bytes_per_token,
            timeout_s=settings.lease_s,
            call_later=call_later,
            drop_transfer=self._dice["drop_transfer"],
            name=f"{settings.host}:{settings.side_channel_port}",
        )
        self._peers = PrefillPeers(
            handshake_s=settings.profile.handshake_s,
            timeout_s=settings.profile.handshake_timeout_s,
            clock=clock,
            on_handshake=lambda peer: log.info(f"NIXL compatibility check passed (simulated, engine {peer})"),
            named_by_address=True,
        )
        self._loading: dict[SglangAnswer, asyncio.Task[None]] = {}
        self._page = exposition(
            SglangCollector(
                self.metrics,
                role=settings.role,
                model_name=settings.served_model,
                levels=self.levels,
                total_tokens=settings.kv_blocks * settings.profile.block_tokens,
                page_size=settings.profile.block_tokens,
                context_len=settings.max_model_len,
                old=self._dialect.old_metrics,
            )
        )

    def levels(self) -> Levels:
        """Requests in each queue, and KV in use."""
        scheduler, transferring = self.runner.scheduler, len(self._loading)
        return Levels(
            running=scheduler.running,
            queued=max(0, scheduler.waiting - transferring),
            usage=scheduler.kv_usage,
            bootstrapping=self.rooms.bootstrapping,
            inflight=self.rooms.inflight,
            preallocating=self.runner.wanting,
            transferring=transferring,
        )

    # -- HTTP

    def handle(self, exchange: Exchange) -> None:
        """Answer one HTTP request."""
        route = _ROUTES.get(exchange.path)
        try:
            if route is not None:
                self._serve(route, exchange)
            else:
                self._inform(exchange)
        except Refused as refused:
            body = refusal_body(route, refused.status, refused.message, refused.kind, refused.param)
            exchange.respond(refused.status, body)

    def _inform(self, exchange: Exchange) -> None:
        path = exchange.path
        if path in ("/health", "/health_generate", "/ping"):
            exchange.respond(200)
        elif path == "/v1/models":
            exchange.respond(200, self._models())
        elif path in ("/server_info", "/get_server_info"):
            exchange.respond(200, orjson.dumps(server_info(self.settings)))
        elif path in ("/model_info", "/get_model_info"):
            exchange.respond(200, orjson.dumps(model_info()))
        elif path == "/v1/loads":
            exchange.respond(200, orjson.dumps(loads(self.settings, self.levels(), time.time())))
        elif path == "/get_load":
            exchange.respond(200, orjson.dumps(old_loads(self.settings, self.levels(), self._clock())))
        elif path == "/metrics":
            exchange.respond(200, self._page(), "text/plain; version=0.0.4; charset=utf-8")
        else:
            exchange.respond(404, b'{"detail":"Not Found"}')

    # -- a request

    def _serve(self, route: Route, exchange: Exchange) -> None:
        if exchange.method != "POST":
            exchange.respond(405, b'{"detail":"Method Not Allowed"}')
            return
        arrived = self._clock()
        raw = bytes(exchange.body)
        body = parse_object(raw)
        wanted = (
            parse_generate(body, self.limits)
            if route == "generate"
            else parse_request(route, raw, self.limits)
        )
        rid = str(body.get("rid") or f"{self._random.getrandbits(128):032x}")
        role = self.settings.role
        bootstrap = bootstrap_of(body) if role is not Role.SERVER else None
        if bootstrap is None and role is not Role.SERVER:
            raise Refused(
                400,
                f"Invalid request: Disaggregated request received without bootstrap room id. req.rid={rid!r}",
            )
        head = AnswerHead(
            api=wanted.api,
            id=rid,
            created=int(time.time()),
            model=self.limits.served_model,
            prompt=wanted.prompt,
            return_token_ids=wanted.return_token_ids,
            include_usage=wanted.include_usage,
            continuous_usage=wanted.continuous_usage,
        )
        writer: GenerateWriter | OpenAiWriter
        if route == "generate":
            writer = GenerateWriter(head, incremental=self._dialect.incremental)
        else:
            writer = OpenAiWriter(head)
        answer = SglangAnswer(exchange, wanted, head, self.metrics, arrived, writer, bootstrap)
        answer.on_done = self._open.discard
        if role is Role.PREFILL and bootstrap is not None:
            self._prefill_leg(answer, bootstrap.room)
            return
        self._accept(answer)
        if self._dice["short_output"].strikes():
            answer.shorten()
        answer.begin()
        if bootstrap is not None:
            self._decode_leg(answer, bootstrap)
        else:
            self._local(answer, arrived + self._hop(self._profile.hop_s))

    def _accept(self, answer: SglangAnswer) -> None:
        self._open.add(answer)
        answer.exchange.on_close = lambda: self._abandoned(answer)

    def _abandoned(self, answer: Answer) -> None:
        """The client has left: stop computing, free the blocks, let the other leg know."""
        if answer not in self._open or not isinstance(answer, SglangAnswer):
            return
        super()._abandoned(answer)
        if answer.bootstrap is None:
            return
        if self.settings.role is Role.PREFILL:
            self.rooms.leave(answer.bootstrap.room)
        elif self._loading.pop(answer, None) is not None:
            self._spawn(self._give_up(answer.bootstrap))

    # -- prefill's leg

    def _prefill_leg(self, answer: SglangAnswer, room: int) -> None:
        answer.length, answer.finish = 1, "length"
        leg = PrefillLeg(self, answer, room)
        answer.on_computed = leg.computed
        self._accept(answer)
        try:
            self.rooms.enter(room, leg)
        except RoomTaken:
            self._open.discard(answer)
            answer.exchange.on_close = None
            raise Refused(400, f"bootstrap_room {room} belongs to a request that is still running") from None
        if answer in self._open:
            answer.begin()

    def now(self) -> float:
        """Model time."""
        return self._clock()

    def open(self, answer: SglangAnswer) -> bool:
        """True while somebody waits for this answer."""
        return answer in self._open

    def start_prefill(self, answer: SglangAnswer) -> None:
        """Both legs are here: compute the prompt and keep its KV until it is sent."""
        self._local(answer, max(self._clock(), answer.arrived_s + self._hop(self._profile.hop_s)), hold=True)

    # -- decode's leg

    def _decode_leg(self, answer: SglangAnswer, bootstrap: Bootstrap) -> None:
        self.metrics.stage("decode_prepare", self._clock() - answer.arrived_s)
        seq = self._sequence(answer, kv_ready=True)
        self.runner.reserve(seq, lambda: self._fetch(answer, seq, bootstrap))

    def _fetch(self, answer: SglangAnswer, seq: Sequence, bootstrap: Bootstrap) -> None:
        if answer not in self._open:
            return
        self.metrics.alloc_ms.observe((self._clock() - answer.arrived_s) * 1e3)
        task = asyncio.ensure_future(self._receive(answer, seq, bootstrap))
        self._loading[answer] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _receive(self, answer: SglangAnswer, seq: Sequence, bootstrap: Bootstrap) -> None:
        asked = self._clock()
        try:
            if self._dice["transfer_fail"].strikes():
                self._spawn(self._give_up(bootstrap))
                raise KvLoadError(
                    "Failed to get kvcache from prefill instance, it might be dead", peer_lost=False
                )
            peer = f"{bootstrap.host}:{bootstrap.port}"
            limit = self.settings.lease_s
            async with asyncio.timeout(limit):
                pulled = await self._peers.pull(peer, bootstrap.host, bootstrap.port, str(bootstrap.room))
        except TimeoutError:
            problem = f"Request {bootstrap.room} timed out after {limit:.1f}s in KVPoll.WaitingForInput"
            self._spawn(self._give_up(bootstrap))
            self._lost(answer, seq, bootstrap, problem)
            return
        except KvLoadError as error:
            self._lost(answer, seq, bootstrap, str(error))
            return
        self._loading.pop(answer, None)
        if seq.state is State.CANCELLED:
            return
        self.metrics.stage("decode_bootstrap", pulled.began_s - asked)
        self.metrics.stage("decode_transferred", pulled.ended_s - asked)
        self.metrics.bootstrap_ms.observe(max(0.0, pulled.began_s - asked) * 1e3)
        answer.loaded = len(answer.wanted.prompt)
        digest = damaged(pulled.digest, self._random) if self._dice["corrupt"].strikes() else pulled.digest
        answer.decide(digest, self.limits.vocabulary)
        at = pulled.ended_s + self._hop(self._profile.pd_hop_s)
        call_later(max(0.0, at - self._clock()), lambda: self._join(answer, seq, at))

    def _join(self, answer: SglangAnswer, seq: Sequence, at: float) -> None:
        """Prefill's token came with the KV: it goes out at once, the others follow from this engine's steps."""
        if answer not in self._open:
            return
        more = answer.length - 1
        self.metrics.generation_tokens += 1
        if more == 0:
            self.runner.cancel(seq)
            answer.seq = None
        answer.token(0, at)
        answer.shift = 1
        if more:
            if self._dice["error_in_stream"].strikes():
                answer.error_at = more // 2
            seq.max_tokens = more
            self.runner.submit(seq, at)

    def _lost(self, answer: SglangAnswer, seq: Sequence, bootstrap: Bootstrap, problem: str) -> None:
        self._loading.pop(answer, None)
        if seq.state is State.CANCELLED or answer not in self._open:
            return
        self.metrics.failed_transfers += 1
        room = bootstrap.room
        text = problem if f"{room}" in problem else f"{problem} ({bootstrap.host}:{bootstrap.port})"
        self.log.info(
            f"Decode transfer failed for request rank=0 decode_req.req.rid={answer.request_id!r} "
            f"decode_req.req.bootstrap_room={room} with exception KVTransferError(bootstrap_room={room}): {text}"
        )
        self.runner.cancel(seq)
        answer.abort(text)

    async def _give_up(self, bootstrap: Bootstrap) -> None:
        peer = f"{bootstrap.host}:{bootstrap.port}"
        try:
            await self._peers.release(peer, bootstrap.host, bootstrap.port, str(bootstrap.room))
        except KvLoadError:
            self.metrics.failed_notifications += 1

    # -- steps and transfers

    def _on_transfer(self, key: object, end_s: float) -> None:
        self.rooms.transferred(key, end_s)

    def _on_step(self, step: Step) -> None:
        super()._on_step(step)
        self.metrics.prefill_computed += step.prefill_tokens
        if step.prefill_tokens:
            now = self.levels()
            queues = ""
            if self.settings.role is Role.PREFILL:
                queues = f"#bootstrap-req: {now.bootstrapping}, #inflight-req: {now.inflight}, "
            rate = step.prefill_tokens / max(1e-9, step.end_s - step.start_s)
            self.log.info(
                f"Prefill batch, #new-seq: {len(step.first)}, #new-token: {step.prefill_tokens}, #cached-token: 0, "
                f"token usage: {now.usage:.2f}, #running-req: {now.running}, #queue-req: {now.queued}, "
                f"#pending-token: 0, {queues}cuda graph: False, input throughput (token/s): {rate:.2f}"
            )
        elif step.decoding and step.number % _DECODE_LOG_STEPS == 0:
            now = self.levels()
            queues = ""
            if self.settings.role is Role.DECODE:
                queues = f"#prealloc-req: {now.preallocating}, #transfer-req: {now.transferring}, #retracted-req: 0, "
            rate = step.decoding / max(1e-9, step.end_s - step.start_s)
            tokens = round(now.usage * self.settings.kv_blocks * self.settings.profile.block_tokens)
            self.log.info(
                f"Decode batch, #running-req: {now.running}, #token: {tokens}, token usage: {now.usage:.2f}, "
                f"{queues}cuda graph: True, gen throughput (token/s): {rate:.2f}, #queue-req: {now.queued}"
            )
