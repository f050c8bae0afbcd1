"""What every engine has to do behind every router, as tests: subclass `EngineContract` and say in `case` which.

One stack serves all tests of a case, in the order of the class; the last one ends it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from pytest_pdperf.engines.base import Engine, Programs
from pytest_pdperf.errors import RoleDied
from pytest_pdperf.evidence.drain import wait_drained
from pytest_pdperf.evidence.exposition import Snapshot, Unknown
from pytest_pdperf.evidence.names import Quantity
from pytest_pdperf.evidence.readings import change, engine_of, level
from pytest_pdperf.evidence.record import Evidence, Expected, Status
from pytest_pdperf.evidence.scrape import scrape
from pytest_pdperf.evidence.verdict import judge_evidence
from pytest_pdperf.load.run import run_cell
from pytest_pdperf.load.target import Target
from pytest_pdperf.probing import exact_form, prompt_vocabulary
from pytest_pdperf.routers.base import Router
from pytest_pdperf.spec.topology import FlagValue, Kind, Role, Topology
from pytest_pdperf.spec.workload import Cell, ClosedLoop, Stream
from pytest_pdperf.stack import procfs
from pytest_pdperf.stack.greedy import Answer, ask, body_of, client
from pytest_pdperf.stack.launch import GRACE_S, Stack, launch
from pytest_pdperf.stack.plan import plan_launch
from pytest_pdperf.stack.ports import PortRegistry

PATIENCE_S = 60.0
"""Longest wait for anything but a start: nothing here depends on how fast the machine is."""
MEASURED = (Quantity.REQUESTS_FINISHED, Quantity.PROMPT_TOKENS, Quantity.GENERATION_TOKENS)
LEVELS = (Quantity.RUNNING, Quantity.WAITING, Quantity.KV_USAGE)


@dataclass(frozen=True)
class Case:
    """An engine behind a router, and what it needs to start."""

    engine: Engine
    router: Router
    kind: Kind
    programs: Programs
    model: str = "fast"
    devices: tuple[str, ...] = ()
    """One for every instance: simulators take none."""
    engine_args: tuple[tuple[str, FlagValue], ...] = ()
    fronts: int = 2
    """Decode engines or servers."""
    long_answer: int = 1500
    """Tokens that take far longer than noticing that a client has left."""
    context: int = 16384
    start_s: float = 120.0
    measured: bool = True
    """False for an engine whose metrics the suite does not know."""
    connector: str = "nixl"
    prompt: int = 64
    """Tokens of the prompts that are proven to be transferred."""
    tail: int = 0
    """Tokens at a prompt's end that a connector of whole blocks leaves to decode."""

    @property
    def id(self) -> str:
        """Name of the case among the parameters."""
        connector = "" if self.connector == "nixl" else f"-{self.connector}"
        return f"{self.engine.name}-{self.router.name}-{self.kind.value}{connector}"

    def topology(self) -> Topology:
        """One prefill engine and the fronts, or the fronts alone."""
        pd = {"prefill": {}, "decode": {"replicas": self.fronts}}
        return Topology.model_validate(
            {
                "name": "contract",
                "kind": self.kind.value,
                "roles": pd if self.kind is Kind.PD else {"server": {"replicas": self.fronts}},
                "kv_transfer": {"connector": self.connector} if self.kind is Kind.PD else None,
                "engine_args": dict(self.engine_args),
            }
        )


class Running:
    """A case that is up."""

    def __init__(self, case: Case, stack: Stack, ports: PortRegistry, run_id: str, folder: Path) -> None:
        self.case = case
        self.stack = stack
        self.ports = ports
        self.run_id = run_id
        self.folder = folder
        self.http = client(PATIENCE_S)
        self.form = exact_form(stack.plan.prompt_forms())
        front = Role.DECODE if case.kind is Kind.PD else Role.SERVER
        self.fronts = [instance.id for instance in stack.plan.of_role(front)]

    def ask(self, number: int, n: int, *, form: str, stream: bool = False, length: int = 48) -> Answer:
        """One greedy request through the router; equal numbers are equal prompts."""
        prompt = [33 + (number * 31 + i * (number % 7 + 1)) % 190 for i in range(length)]
        path, body = body_of(self.stack.model, prompt, n, form=form, stream=stream)
        return ask(self.http, self.stack.url, path, body, want=n, timeout_s=PATIENCE_S)

    def pages(self) -> dict[str, Snapshot | Unknown]:
        """The metrics of every engine."""
        return dict(scrape(self.stack.role_urls, 10.0))

    def idle(self) -> dict[str, Snapshot | Unknown]:
        """The metrics once nothing runs any more."""
        drain = wait_drained(self.stack.role_urls, PATIENCE_S, poll_s=0.1)
        assert drain.status == "drained", drain.reasons
        return dict(drain.snapshots)

    def evidence(self, before: dict[str, Snapshot | Unknown], expected: Expected) -> Evidence:
        """What the engines say about the requests since `before`."""
        drain = wait_drained(self.stack.role_urls, PATIENCE_S, before=before, poll_s=0.1)
        assert drain.status == "drained", drain.reasons
        roles = {instance.id: instance.role for instance in self.stack.plan.instances}
        return judge_evidence(self.case.kind, before, drain.snapshots, expected, roles)


class EngineContract:
    """The contract. Subclasses give `case`, parametrised or not."""

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls) -> Case:
        """The engine and router under test."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def running(cls, case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
        """The case, brought up once for all its tests."""
        folder = tmp_path_factory.mktemp("contract")
        ports, run_id = PortRegistry(folder / "ports"), f"contract-{folder.name}-{time.time_ns()}"
        topology = case.topology()
        plan = plan_launch(
            topology,
            case.engine,
            case.router,
            placement={id: case.devices for id, _, _ in topology.instances},
            model=case.model,
            served_model="m",
            programs=case.programs,
            log_dir=folder / "logs",
            run_id=run_id,
            ports=ports,
        )
        with launch(plan, deadline_s=case.start_s) as stack:
            running = Running(case, stack, ports, run_id, folder)
            yield running
            running.http.close()
        assert procfs.marked(run_id) == []

    def test_it_is_up_and_every_pair_is_warm(self, running: Running) -> None:
        stack = running.stack
        stack.check()
        for url in stack.role_urls.values():
            assert running.http.get(f"{url}/health").status_code == 200
            listed = running.http.get(f"{url}/v1/models").json()["data"]
            assert [model["id"] for model in listed] == ["m"]
        assert not [note for note in stack.notes if "not warmed" in note]
        if running.case.kind is Kind.PD:
            warm = {*stack.warmth.through_router, *stack.warmth.direct}
            assert warm == {("prefill-0", front) for front in running.fronts}

    def test_answers_have_the_length_asked_for_and_are_repeatable(self, running: Running) -> None:
        forms = running.stack.plan.prompt_forms()
        assert forms, "no prompt gets through at all"
        for form in sorted(forms):
            for n in (1, 2, 37):
                first, again = (running.ask(n, n, form=form) for _ in range(2))
                assert first.error == "", f"{form}, {n} tokens"
                assert first.completion_tokens == n
                assert len(first.tokens) == n, "every token is named"
                assert first.tokens == again.tokens
            other = running.ask(99, 37, form=form)
            assert other.tokens != running.ask(37, 37, form=form).tokens, "another prompt, another answer"

    def test_a_stream_says_what_a_whole_answer_says(self, running: Running) -> None:
        for form in sorted(running.stack.plan.prompt_forms()):
            for n in (1, 37):
                whole, streamed = (running.ask(n, n, form=form, stream=stream) for stream in (False, True))
                assert streamed.error == ""
                assert streamed.completion_tokens == n
                assert streamed.tokens == whole.tokens
                assert streamed.text == whole.text

    def test_what_does_not_fit_is_refused_and_the_next_request_is_served(self, running: Running) -> None:
        form = sorted(running.stack.plan.prompt_forms())[0]
        refused = running.ask(5, 1, form=form, length=running.case.context + 1)
        assert "HTTP 4" in refused.error, refused.error
        # vLLM cuts an answer short that would not fit; what matters is that it is not taken for a whole one.
        assert running.ask(5, running.case.context, form=form).error
        assert running.ask(5, 3, form=form).error == ""

    def test_metrics_are_understood(self, running: Running) -> None:
        if not running.case.measured:
            pytest.skip("an engine whose metrics the suite does not know")
        before = running.idle()
        form = sorted(running.stack.plan.prompt_forms())[0]
        for number in range(len(running.fronts)):
            assert running.ask(300 + number, 5, form=form).error == ""
        after = running.idle()
        generated = 0.0
        for id in running.stack.role_urls:
            first, last = before[id], after[id]
            assert isinstance(first, Snapshot), first
            assert isinstance(last, Snapshot), last
            assert engine_of(last) is not None
            for quantity in LEVELS:
                assert isinstance(level(last, quantity), float), f"{id}: {level(last, quantity)}"
            for quantity in MEASURED:
                value = change(first, last, quantity)
                assert isinstance(value, float), f"{id}: {value}"
                if quantity is Quantity.GENERATION_TOKENS and id in running.fronts:
                    generated += value
        assert generated == 5 * len(running.fronts)

    def test_a_cell_has_no_error_and_is_proven(self, running: Running) -> None:
        requests, shape = 12, (running.case.prompt, 16)
        before = running.idle() if running.case.measured else {}
        if running.form is None:
            forms = running.stack.plan.prompt_forms()
            answers = [running.ask(i, shape[1], form=sorted(forms)[0]) for i in range(requests)]
            assert [answer.error for answer in answers] == [""] * requests
            expected = Expected(requests, None, requests * shape[1])
        else:
            target = Target(
                running.stack.url,
                "m",
                api="generate" if running.form == "generate_ids" else "completions",
                vocab=prompt_vocabulary(running.case.model),
            )
            closed = ClosedLoop(concurrency=4)
            stream = Stream(
                input_tokens=(shape[0], shape[0]), output_tokens=shape[1], requests=requests, arrival=closed
            )
            cell = Cell(workload="contract", id="cell", streams=(stream,), warmups=0, timeout_s=PATIENCE_S)
            records = run_cell(
                target,
                cell,
                seed=1,
                salt=running.run_id,
                out_dir=running.folder / "cell",
                check=running.stack.check,
            )
            bad = [(record.status, record.error) for record in records.requests if record.status != "ok"]
            assert bad == [], bad
            lengths = {(r.prompt_tokens, r.completion_tokens) for r in records.requests}
            assert lengths == {shape}
            tail = running.case.tail
            expected = Expected(requests, requests * shape[0], requests * shape[1], tail)
        if not running.case.measured:
            return
        evidence = running.evidence(before, expected)
        assert evidence.problems == ()
        wanted = Status.PROVEN if running.case.kind is Kind.PD else Status.NOT_APPLICABLE
        assert evidence.status is wanted, evidence.summary
        assert evidence.retries == 0
        assert evidence.leak is False

    def test_a_client_that_leaves_is_forgotten(self, running: Running) -> None:
        if not running.case.measured:
            pytest.skip("an engine whose metrics the suite does not know")
        before = running.idle()
        form, long = sorted(running.stack.plan.prompt_forms())[0], running.case.long_answer
        path, body = body_of("m", [41, 42, 43, 44] * 12, long, form=form, stream=True)
        with running.http.stream("POST", running.stack.url + path, json=body) as response:
            assert response.status_code == 200
            assert next(response.iter_raw()), "it has begun"
        drain = wait_drained(running.stack.role_urls, PATIENCE_S, before=before, poll_s=0.1)
        assert drain.status == "drained", drain.reasons
        generated = 0.0
        for id in running.fronts:
            first, last = before[id], drain.snapshots[id]
            assert isinstance(first, Snapshot)
            assert isinstance(last, Snapshot)
            value = change(first, last, Quantity.GENERATION_TOKENS)
            assert isinstance(value, float), value
            generated += value
        assert generated < long, "it went on for nobody"
        assert running.ask(7, 3, form=form).error == ""

    def test_a_death_is_told_at_once_and_the_rest_ends_on_sigterm(self, running: Running) -> None:
        stack, victim = running.stack, running.fronts[-1]
        stack.check()
        found = procfs.read_stat(stack.pids[victim])
        assert found is not None
        procfs.send(found.proc, signal.SIGKILL)
        until = time.monotonic() + PATIENCE_S
        with pytest.raises(RoleDied) as death:
            while time.monotonic() < until:
                stack.check()
                time.sleep(0.02)
        assert death.value.instance == victim
        assert "SIGKILL" in death.value.reason
        assert death.value.detail, "with the end of its log"
        assert stack.close(GRACE_S) == ()
        ends = {id: process.poll() for id, process in stack.processes.items() if id != victim}
        codes = {id: end.code if end else None for id, end in ends.items()}
        assert all(code in (0, -signal.SIGTERM, 128 + signal.SIGTERM) for code in codes.values()), codes
        assert procfs.marked(running.run_id) == []
        assert running.ports.held() == ()
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{stack.url}/health", trust_env=False)
