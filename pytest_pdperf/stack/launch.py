"""Brings a planned stack up, watches it and takes it down, leaving nothing behind in any case."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx

from pytest_pdperf.engines.base import Instance
from pytest_pdperf.errors import BringUpError
from pytest_pdperf.stack import pairs
from pytest_pdperf.stack.greedy import Answer, client
from pytest_pdperf.stack.launcher import LOOPBACK
from pytest_pdperf.stack.logs import Follower, strip_stamp, tail
from pytest_pdperf.stack.plan import LaunchPlan
from pytest_pdperf.stack.ports import port_owner, port_state
from pytest_pdperf.stack.running import FAILED_GRACE_S, GRACE_S, Stack, blame, obituary
from pytest_pdperf.stack.secrets import mask
from pytest_pdperf.stack.stages import STARTING, stage_limits

__all__ = ["FAILED_GRACE_S", "GRACE_S", "Stack", "blame", "launch", "obituary"]

_TICK_S = 0.05
_DEATH_S = 1.0
"""A process that failed a request may be known to be dead only so much later: its reaper has to be scheduled."""
_TELL_S = 15.0
"""Between two progress lines while nothing new happens."""
_HTTP_S = 0.5
"""Time-out of one health request: short, so that a death is noticed within a second."""
_ADDRESS_IN_USE = re.compile(r"[Aa]ddress already in use|EADDRINUSE")

Progress = Callable[[str], None]


def launch(
    plan: LaunchPlan,
    *,
    deadline_s: float,
    router_deadline_s: float = 90.0,
    request_deadline_s: float = 180.0,
    progress: Progress | None = None,
    called_off: Callable[[], bool] = lambda: False,
    base: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Stack:
    """Start everything of a plan and return when it is really ready.

    Ready is: every engine healthy and serving the model, the router sees every worker, and a real request
    went through every prefill x decode pair. The router starts last, because vllm-router counts workers
    healthy that came up after it without asking them.

    `deadline_s` bounds the whole and, scaled, each stage of an engine (see `stages`), `router_deadline_s` the
    router's part, `request_deadline_s` each first request (a first NIXL handshake can take half a minute).
    `base` is the environment that processes start from (default: this process's); `called_off` is asked all the time
    and ends the bring-up when true.

    Raises BringUpError, within about a second of a process dying or at `deadline_s` at the latest; whatever
    was started has ended by then, and the plan's ports are free.
    """
    limits = _Limits(deadline_s, router_deadline_s, request_deadline_s)
    bring_up = _BringUp(plan, limits, progress or (lambda text: None), called_off, base, clock, sleep)
    try:
        bring_up.engines()
        bring_up.router()
        bring_up.pairs()
    except BaseException:
        bring_up.stack.close(FAILED_GRACE_S)
        raise
    bring_up.stack.startup_s["total"] = clock() - bring_up.began
    bring_up.stack.watch_hangs()
    return bring_up.stack


@dataclass(frozen=True)
class _Limits:
    """Longest waits, in seconds."""

    total: float
    router: float
    request: float


@dataclass
class _Seen:
    """What is known about the start-up of one process."""

    follower: Follower
    stage: str = STARTING
    since: float = 0.0


class _BringUp:
    def __init__(
        self,
        plan: LaunchPlan,
        limits: _Limits,
        progress: Progress,
        called_off: Callable[[], bool],
        base: Mapping[str, str] | None,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self.plan = plan
        self.progress = progress
        self.called_off = called_off
        self.base = base
        self.clock = clock
        self.sleep = sleep
        self.began = clock()
        self.limits = limits
        self.until = self.began + limits.total
        self.stage_limits = stage_limits(plan.engine, plan.engine.name, limits.total)
        self.told = self.began
        self.stack = Stack(plan, {})
        self.seen: dict[str, _Seen] = {}

    def start(self, id: str) -> None:
        try:
            process = self.plan.launcher.start(
                id,
                self.plan.commands[id],
                log=self.plan.log(id),
                run_id=self.plan.run_id,
                cpus=self.plan.cpus.get(id, ()),
                base=self.base,
            )
        except OSError as error:
            raise BringUpError(f"{id} could not be started: {error}") from error
        self.stack.processes[id] = process
        self.seen[id] = _Seen(Follower(process.log), since=self.clock())

    def engines(self) -> None:
        """Start all engines together and wait until each is healthy and lists the model."""
        began = self.clock()
        for instance in self.plan.instances:
            self.start(instance.id)
        waiting: dict[str, Instance] = {i.id: i for i in self.plan.instances}
        with client(_HTTP_S) as http:
            while waiting:
                for id, instance in list(waiting.items()):
                    self.watch(waiting)
                    if self._serves(http, instance):
                        self._stage(id, "healthy")
                        del waiting[id]
                if waiting:
                    self.sleep(_TICK_S)
        self.watch({})
        self.stack.startup_s["engines"] = self.clock() - began

    def router(self) -> None:
        """Start the router and wait until it counts every worker."""
        router, instance = self.plan.router, self.plan.router_instance
        if router is None or instance is None:
            return
        began = self.clock()
        self.until = min(self.began + self.limits.total, began + self.limits.router)
        self.start("router")
        answer: str = "no answer yet"
        with client(_HTTP_S) as http:
            while True:
                self.watch({"router": None}, f"last readiness answer: {answer}")
                try:
                    response = http.get(instance.url + router.ready_path(instance))
                    answer = f"HTTP {response.status_code} {response.text[:200]}"
                    body = response.json() if response.status_code == 200 else None
                except (httpx.HTTPError, ValueError) as error:
                    body, answer = None, type(error).__name__
                if isinstance(body, Mapping) and router.sees_all_workers(instance, body):
                    break
                self.sleep(_TICK_S)
        self._stage("router", "sees every worker")
        self.stack.startup_s["router"] = self.clock() - began

    def pairs(self) -> None:
        """Send real requests until every pair has served one."""
        began = self.clock()
        with client(_HTTP_S) as http:
            warmth = pairs.warm_up(self.plan, http, self._watched, timeout_s=self.limits.request)
        self.watch({})
        self.stack.warmth = warmth
        self.stack.notes = self.plan.warnings + warmth.notes
        self.stack.startup_s["pairs"] = self.clock() - began

    def watch(self, waiting: Mapping[str, object], extra: str = "") -> None:
        """Follow the logs; raise BringUpError for a death, a port conflict, the deadline, or when called off."""
        if self.called_off():
            raise BringUpError("called off before it was ready")
        for id, seen in self.seen.items():
            for line in seen.follower.new_lines():
                stage = self.plan.launcher.stage(line)
                if stage is None and id != "router":
                    stage = self.plan.engine.stage(line)
                if stage is not None:
                    self._stage(id, stage)
                if id != "router" and _ADDRESS_IN_USE.search(line):
                    # In a side thread this leaves a server that is healthy and cannot transfer.
                    self._fail(id, f"a port was taken: {line.strip()[:300]}{self._takers(id)}")
        for id, process in self.stack.processes.items():
            if process.poll() is not None:
                reason, detail = obituary(self.plan, process)
                age = process.age_s()
                raise BringUpError(
                    f"{id} ended {age:.1f} s after its start, stage '{self.seen[id].stage}': {reason}", detail
                )
        now = self.clock()
        late = next(iter(waiting), None)
        if late is None:
            return
        if now > self.until:
            age = self.stack.processes[late].age_s()
            text = f"not ready {age:.1f} s after its start; {self._state(waiting)}"
            self._fail(late, text + (f"; {extra}" if extra else ""))
        for id in waiting:
            seen = self.seen[id]
            limit = self.stage_limits.get(seen.stage) if id != "router" else None
            if limit is not None and now - seen.since > limit:
                age = self.stack.processes[id].age_s()
                text = f"in stage '{seen.stage}' for {now - seen.since:.1f} s, which may take {limit:.1f} s"
                self._fail(
                    id,
                    f"{text} (of a start-up timeout of {self.limits.total:g} s); {age:.1f} s after its start",
                )
        if now - self.told > _TELL_S:
            self.told = now
            self.progress(f"waiting: {self._state(waiting)}")

    def _state(self, waiting: Mapping[str, object]) -> str:
        now = self.clock()
        return ", ".join(
            f"{id} in stage '{self.seen[id].stage}' for {now - self.seen[id].since:.1f} s" for id in waiting
        )

    def _takers(self, id: str) -> str:
        """Which of an instance's ports somebody else holds."""
        ours = set(self.stack.processes[id].session())
        instance = next(i for i in self.plan.instances if i.id == id)
        if instance.host != LOOPBACK:
            return ""  # another machine's ports
        numbers = {"http": instance.ports.http, "bootstrap": instance.ports.bootstrap}
        if instance.ports.side_channel:
            numbers |= {
                f"side channel {rank}": instance.ports.side_channel + rank
                for rank in range(instance.tensor_parallel)
            }
        held = [
            f"{name} port {port} is held by {port_owner(port, besides=ours)}"
            for name, port in numbers.items()
            if port and port_state(port) == "busy"
        ]
        return "".join(f"; {text}" for text in held if "may not see" not in text)

    def _fail(self, id: str, text: str) -> None:
        process = self.stack.processes[id]
        raise BringUpError(mask(f"{id}: {text}", process.secrets), tail(process.log))

    def _stage(self, id: str, stage: str) -> None:
        seen = self.seen[id]
        if seen.stage != stage:
            seen.stage, seen.since = stage, self.clock()
            self.progress(f"{id}: {stage} ({self.clock() - self.began:.0f} s)")

    def _serves(self, http: httpx.Client, instance: Instance) -> bool:
        try:
            if http.get(instance.url + "/health").status_code != 200:
                return False
            listed = http.get(instance.url + "/v1/models").json()
            names = [str(m.get("id")) for m in listed.get("data", ())]
            if instance.served_model not in names:
                self._stage(instance.id, f"healthy, but serves {names} instead of {instance.served_model!r}")
                return False
            return True
        except (httpx.HTTPError, ValueError, AttributeError, TypeError):
            return False

    def _watched(self, what: str, request: Callable[[], Answer]) -> Answer:
        """Run a request in a thread of its own while this one watches processes and deadline."""
        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(request()), daemon=True)
        self.progress(what)
        thread.start()
        began = self.clock()
        until = min(self.began + self.limits.total, began + self.limits.request)
        while thread.is_alive():
            self.watch({})
            if self.clock() > until:
                raise BringUpError(f"{what}: no answer within {self.clock() - began:.1f} s", self._tails())
            thread.join(_TICK_S)
        answer = answers[0] if answers else Answer(error="the request ended without an answer")
        if answer.error:
            for _ in range(round(_DEATH_S / _TICK_S)):  # a death explains it better
                self.watch({})
                self.sleep(_TICK_S)
            raise BringUpError(f"{what}: {answer.error}", self._tails())
        return answer

    def _tails(self) -> str:
        return "\n".join(
            f"--- {id}\n" + "\n".join(strip_stamp(line) for line in tail(p.log, 12).splitlines())
            for id, p in self.stack.processes.items()
        )
