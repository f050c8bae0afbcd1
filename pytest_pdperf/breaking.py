"""Breaks a running stack on purpose and tells what became of those who were hit, of the others, and of its memory."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from types import TracebackType

import httpx
import orjson

from .engines.base import Instance
from .evidence.drain import wait_drained
from .evidence.exposition import Snapshot, Unknown
from .evidence.names import Quantity
from .evidence.readings import change, level
from .evidence.scrape import scrape
from .evidence.ttft_split import TtftSplit, split_ttft
from .spec.topology import Role
from .stack.flights import Fleet, Flight
from .stack.greedy import client
from .stack.launch import Stack
from .stack.pairs import NamesPairs, prompt
from .stack.plan import LaunchPlan

FAULTS = "faults"
"""Folder of the reports below a run's."""
UNDER_WAY_TOKENS = 3
"""A stream that has brought so many tokens is in the middle of decode."""
PATIENCE_S = 60.0
"""For whatever a healthy stack does in a second or two, on a machine that is busy."""
TOLD_S = 20.0
"""Within which a client must know that its request is lost, and an engine must have let go of it."""
ENDS_S = 240.0
"""What one fault test waits in sum, beside the start of an engine and the KV that prefill may keep for a while."""
SHORT_TOKENS = 4
HOLD_VARIABLES = {
    "nixl": "VLLM_NIXL_ABORT_REQUEST_TIMEOUT",
    "mooncake": "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT",
}
USUAL_HOLD_S = {("vllm", "nixl"): 30.0, ("vllm", "mooncake"): 480.0}
"""Engine and connector: vLLM's kv_lease_duration (0.26 or newer), and VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT."""
SIMULATED_HOLD_S = 30.0
LONGEST_HOLD_S = 480.0
LONGEST_STREAM = 400
LONGEST_PROMPT = 8000


@dataclass
class Report:
    """What one fault did, ready for its file. Times in seconds."""

    fault: str
    topology: str
    engine: str
    how: str = ""
    told: dict[str, int] = field(default_factory=dict)
    """What the clients of the broken part were told -> how many of them."""
    unharmed: int = 0
    """Requests beside the fault that came complete."""
    meanwhile: dict[str, int] = field(default_factory=dict)
    """What requests sent while the part was broken were told -> how many."""
    told_after_s: float | None = None
    """From the fault until the last client that it hit knew."""
    restarted_s: float | None = None
    """From a new start of the dead role until it serves again; the engine's own."""
    recovered_s: float | None = None
    """From the end of the fault (the dead role serves again, the link is fast again) to the first request after which
    none fails."""
    drained_s: float | None = None
    """Until no engine runs or holds anything."""
    numbers: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        """The report for people."""
        told = "; ".join(f"{count} x {words}" for words, count in self.told.items())
        parts = [f"{self.fault} on {self.topology}: {told or self.how or 'nobody was hit'}"]
        parts.append(f"{self.unharmed} unharmed")
        parts += [
            f"{words} {value:.2f} s"
            for words, value in (
                ("known after", self.told_after_s),
                ("restarted in", self.restarted_s),
                ("recovered in", self.recovered_s),
                ("drained in", self.drained_s),
            )
            if value is not None
        ]
        return ", ".join(parts)

    def write(self, folder: Path) -> None:
        """Leave the report in `folder`, one file a fault and topology."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self.topology} {self.fault}".replace(" ", "-")
        (folder / f"{name}.json").write_bytes(orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2))


class Breaking:
    """One fault on one stack. Use as a context manager: what is still under way at its end is given up.

    It looks before, the test breaks something, and the methods tell what happened; each collects problems instead of
    raising, so that a report is whole also where something went wrong.
    """

    def __init__(self, stack: Stack, fault: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        plan = stack.plan
        self.stack = stack
        self.report = Report(fault, plan.topology.name, plan.engine.name)
        self._clock = clock
        self._ends_s = clock() + ENDS_S + hold_s(plan)
        self._numbers = 0
        self._longest = longest_context(stack)
        forms = plan.prompt_forms()
        form = next(f for f in ("token_ids", "generate_ids", "text") if f in forms)
        self._fleet = Fleet(stack.url, stack.model, form=form, clock=clock)

    def __enter__(self) -> Breaking:
        self._fleet.__enter__()
        try:
            self.before = wait_drained(self.stack.role_urls, TOLD_S).snapshots
        except BaseException:
            self._fleet.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fleet.__exit__(kind, error, trace)

    # -- requests

    @property
    def replicas(self) -> int:
        """Decode engines."""
        return len(self.stack.plan.of_role(Role.DECODE))

    def send(
        self,
        count: int,
        *,
        output: int = SHORT_TOKENS,
        length: int = 160,
        url: str = "",
        extra: Mapping[str, object] | None = None,
    ) -> list[Flight]:
        """Send `count` requests with prompts that were never used before, to the router or straight to `url`."""
        length = min(length, self._longest - output - 1)
        self._numbers += count
        return [
            self._fleet.send(prompt(100 + number, length), output, url=url, extra=extra)
            for number in range(self._numbers - count, self._numbers)
        ]

    def streams(self, count: int, output: int = LONGEST_STREAM) -> list[Flight]:
        """Long answers, all of them in the middle of decode on return."""
        flights = self.send(count, output=min(output, self._longest // 2))
        self.wait(lambda: all(f.seen >= UNDER_WAY_TOKENS or f.over for f in flights), "streams have begun")
        for flight in flights:
            if flight.over and not flight.complete:
                self.problem(f"before the fault: {flight.words()}")
        return flights

    def prompts(self, count: int) -> list[Flight]:
        """Long prompts, with an engine of the prefill role at work on them on return."""
        flights = self.send(count, length=min(LONGEST_PROMPT, self._longest * 3 // 4))
        urls = {i.id: i.url for i in self.stack.plan.of_role(Role.PREFILL)}
        self.wait(lambda: busy(urls) or all(f.over for f in flights), "prefill works")
        return flights

    def pages(self) -> Mapping[str, Snapshot | Unknown]:
        """What the engines count, once they are idle."""
        return wait_drained(self.stack.role_urls, TOLD_S).snapshots

    def first_tokens(self, count: int, length: int = 1000) -> list[float]:
        """Times to the first token of `count` requests, one after the other, in seconds; NaN where none came."""
        times = []
        for _ in range(count):
            (flight,) = self.send(1, length=length)
            self.wait(lambda flight=flight: flight.over, "an answer")  # type: ignore[misc]
            self.unharmed([flight])
            times.append(math.nan if flight.first_s is None else flight.first_s - flight.sent_s)
        return times

    def stages(
        self,
        before: Mapping[str, Snapshot | Unknown],
        after: Mapping[str, Snapshot | Unknown],
        times: Sequence[float],
    ) -> TtftSplit | Unknown:
        """Where the time to the first token went, by the engines' own clocks, for all requests between two pages."""
        return split_ttft(
            self.stack.plan.topology.kind,
            before,
            after,
            {instance.id: instance.role for instance in self.stack.plan.instances},
            measured_ttft_ms=1e3 * fmean(times),
            requests=len(times),
        )

    def leave(self, flights: Iterable[Flight]) -> None:
        """Close the connections of these requests."""
        for flight in flights:
            self._fleet.leave(flight)

    def on(self, flights: Sequence[Flight], instance: str) -> list[Flight]:
        """Those that this engine decodes, by the answers' ids; all where the router does not say."""
        router = self.stack.plan.router
        address = {i.id: f"{i.host}:{i.ports.http}" for i in self.stack.plan.instances}[instance]
        if not isinstance(router, NamesPairs):
            return list(flights)
        pairs = {id(flight): router.pair_of(flight.id) for flight in flights}
        return [flight for flight in flights if (pair := pairs[id(flight)]) and address in pair]

    def wait(self, true: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> bool:
        """Poll until `true()`; False and a problem after `seconds`, or once the test has had its time."""
        end = self._clock() + seconds
        while not true():
            now = self._clock()
            if now > min(end, self._ends_s):
                late = f"{seconds:g} s" if now > end else "the time of the whole test"
                self.problem(f"not within {late}: {what}")
                return False
            time.sleep(0.01)
        return True

    def again(self, instance: str, deadline_s: float) -> None:
        """Start an engine that was killed once more; its start takes nothing off the test's own time."""
        self.report.restarted_s = self.stack.restart(instance, deadline_s=deadline_s)
        self._ends_s += self.report.restarted_s

    def problem(self, text: str) -> None:
        """Remember what should not have happened."""
        self.report.problems.append(text)

    # -- what became of it

    def told(self, flights: Sequence[Flight], since_s: float) -> None:
        """These were hit: within TOLD_S each must know, by an error or a broken stream, never by a short answer."""
        self.wait(lambda: all(f.over for f in flights), "clients of the broken part know", TOLD_S)
        self.report.told = dict(Counter(flight.words() for flight in flights))
        ends = [f.ended_s for f in flights if f.ended_s is not None]
        self.report.told_after_s = max(ends) - since_s if ends else None
        self.report.problems += [f.words() for f in flights if not (f.error or f.complete or f.left)]

    def unharmed(self, flights: Sequence[Flight]) -> None:
        """These had nothing to do with the fault: all must come complete."""
        self.wait(lambda: all(f.over for f in flights), "requests beside the fault come to their end")
        self.report.unharmed += sum(f.complete for f in flights)
        self.report.problems += [f"beside the fault: {f.words()}" for f in flights if not f.complete]

    def meanwhile(self, count: int) -> list[Flight]:
        """Requests sent while it is broken: each must come complete or be refused in time."""
        flights = self.send(count)
        self.wait(lambda: all(f.over for f in flights), "requests meanwhile are answered or refused", TOLD_S)
        self.report.meanwhile = dict(Counter(flight.words() for flight in flights))
        self.report.problems += [f"meanwhile: {f.words()}" for f in flights if not (f.error or f.complete)]
        return flights

    def recover(self, limit_s: float = PATIENCE_S) -> None:
        """From now on, how long until requests come complete, twice as many in a row as there are decode engines."""
        began = self._clock()
        streak: list[Flight] = []
        last = ""
        end = min(began + limit_s, self._ends_s)
        while len(streak) < 2 * self.replicas:
            if self._clock() > end:
                self.problem(f"not recovered within {end - began:.0f} s: {last}")
                return
            (flight,) = self.send(1)
            self.wait(lambda flight=flight: flight.over, "an answer after the fault")  # type: ignore[misc]
            streak = [*streak, flight] if flight.complete else []
            last = last if flight.complete else flight.words()
        self.report.recovered_s = max(0.0, streak[0].sent_s - began)
        # A router that still reports itself unwell would be taken for dead by whoever uses the stack next.
        hangs = self.stack.hangs
        if hangs is not None:
            self.wait(lambda: not hangs.hangs(), "router and engines report themselves healthy", limit_s)

    def clean(self, *, fresh: Sequence[str] = ()) -> None:
        """Every engine must be idle, its KV usage as before; `fresh` are engines that started anew.

        KV that nobody fetched may stay on prefill as long as the engine says, and no longer.
        """
        limit_s = min(hold_s(self.stack.plan) + TOLD_S, max(0.0, self._ends_s - self._clock()))
        before = {name: page for name, page in self.before.items() if name not in fresh}
        drain = wait_drained(self.stack.role_urls, limit_s, before=before)
        self.report.drained_s = drain.waited_s
        if drain.status != "drained":
            self.report.problems += [f"left behind: {text}" for text in drain.reasons]
        self.after = drain.snapshots

    def counted(self, role: Role, quantity: Quantity) -> float | None:
        """How far a counter of a role's engines has come since the look before the fault; None where one is unknown."""
        pages: Mapping[str, Snapshot | Unknown] = scrape(self.stack.role_urls)
        total = 0.0
        for instance in self.stack.plan.of_role(role):
            old, new = self.before.get(instance.id), pages.get(instance.id)
            if not isinstance(old, Snapshot) or not isinstance(new, Snapshot):
                return None
            step = change(old, new, quantity)
            if isinstance(step, Unknown):
                return None
            total += step
        return total


def lines(folder: Path) -> list[str]:
    """What the reports in a folder say, a line each; nothing where there is none."""
    found = []
    for path in sorted(folder.glob("*.json")):
        report = Report(**orjson.loads(path.read_bytes()))
        found += [report.line(), *(f"  {text}" for text in report.problems)]
    return found


def misbehave(engine: Instance, faults: str) -> None:
    """Change the faults of a simulated engine that is up; an empty text makes it a healthy one."""
    with client(TOLD_S) as http:
        http.post(f"{engine.url}/simulator/faults", content=faults).raise_for_status()


def speaks_nixl(plan: LaunchPlan) -> bool:
    """Whether decode is told in the request where its KV lies, as vLLM's NIXL connector wants it."""
    kv = plan.topology.kv_transfer
    return kv is not None and kv.connector == "nixl" and "token_ids" in plan.engine.supported_prompts()


def hold_s(plan: LaunchPlan) -> float:
    """How long prefill keeps KV that nobody fetches, in seconds, as it was started."""
    prefill = plan.of_role(Role.PREFILL)[0]
    kv = plan.topology.kv_transfer
    connector = kv.connector if kv is not None else "nixl"
    variable = HOLD_VARIABLES.get(connector, "")
    told = prefill.args.get("kv_lease_s") or {**os.environ, **prefill.env}.get(variable)
    usual = USUAL_HOLD_S.get((plan.engine.name, connector), LONGEST_HOLD_S)
    return float(str(told)) if told else SIMULATED_HOLD_S if plan.engine.simulated else usual


def nobodys_kv(prefill: Instance) -> dict[str, object]:
    """Fields of a request to a decode engine that sends it to `prefill` for the KV of an engine that is not there."""
    return {
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[0, 1]],
            "remote_engine_id": "nobody",
            "remote_request_id": "cmpl-nobody",
            "remote_host": prefill.host,
            "remote_port": prefill.ports.side_channel,
            "tp_size": prefill.tensor_parallel,
        }
    }


def longest_context(stack: Stack) -> int:
    """Prompt and output together, in tokens, that every engine of the stack takes, as they say themselves."""
    known = []
    with client() as http:
        for url in stack.role_urls.values():
            try:
                listed = http.get(f"{url}/v1/models").json()["data"]
                known += [row["max_model_len"] for row in listed if isinstance(row.get("max_model_len"), int)]
            except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
                continue
    return min(known, default=2048)


def busy(urls: Mapping[str, str]) -> bool:
    """Whether any of these engines runs or queues a request, by its own page."""
    pages = scrape(urls)
    return any(
        isinstance(value := _level(page, quantity), float) and value > 0
        for page in pages.values()
        for quantity in (Quantity.RUNNING, Quantity.WAITING)
    )


def _level(page: Snapshot | Unknown, quantity: Quantity) -> float | None:
    value = level(page, quantity) if isinstance(page, Snapshot) else page
    return None if isinstance(value, Unknown) else value
