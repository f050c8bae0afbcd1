"""Faults: break a running PD stack on purpose. Who is told what, who is not harmed, when does it serve again?

Run them with `-m fault`; they are no part of `-m pd`. They measure no performance and store no baseline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import median

import pytest

from pytest_pdperf.breaking import FAULTS, TOLD_S, Breaking, misbehave, nobodys_kv, speaks_nixl
from pytest_pdperf.evidence.exposition import Unknown
from pytest_pdperf.evidence.names import Quantity
from pytest_pdperf.evidence.record import Expected, Status
from pytest_pdperf.evidence.ttft_split import TtftSplit, moved_stage
from pytest_pdperf.evidence.verdict import judge_evidence
from pytest_pdperf.session import Session
from pytest_pdperf.spec.topology import Role, Topology
from pytest_pdperf.stack.launch import Stack
from pytest_pdperf.stack.slow_net import NoSlowNet, own_network

pytestmark = pytest.mark.pdperf_cells("fault")

SLOWED_S = 1.0
"""What the bytes of one request take on the slowed link."""
DELAY_MS = 50.0
"""By which it carries everything later besides, where the kernel has netem."""
SHORT_STREAM = 64
"""Tokens of a stream that is under way when the link is slowed."""
RECOVERY_S = 180.0
"""From a dead role's serving again to its router's using it again: a router may look once a minute."""

Break = Callable[[Stack, str], Breaking]


@pytest.fixture(scope="module", autouse=True)
def spoilt(pdperf: Session) -> Iterator[None]:
    """Nothing is measured on a stack that was broken: the next module gets a fresh one."""
    yield
    pdperf.take_down()


@pytest.fixture
def broken(pdperf: Session, record_property: Callable[[str, object], None]) -> Iterator[Break]:
    """Begin to break a stack; at the end the report is kept, and a stack that did not get well is replaced."""
    begun: list[Breaking] = []
    with ExitStack() as open_ones:

        def begin(stack: Stack, fault: str) -> Breaking:
            breaking = open_ones.enter_context(Breaking(stack, fault))
            begun.append(breaking)
            return breaking

        yield begin
    for breaking in begun:
        report = breaking.report
        report.write(pdperf.folder / FAULTS)
        for name in ("told_after_s", "restarted_s", "recovered_s", "drained_s"):
            if (value := getattr(report, name)) is not None:
                record_property(f"pdperf_{name}", value)
    if any(breaking.report.problems for breaking in begun):
        pdperf.take_down()
        pdperf.begin_launch(pdperf.bench.launch)


def passed(breaking: Breaking) -> None:
    """Fail with everything that should not have happened."""
    report = breaking.report
    if report.problems:
        pytest.fail("\n".join([report.line(), *report.problems]), pytrace=False)


def test_decode_dies_mid_stream(pdperf: Session, stack: Stack, broken: Break) -> None:
    """Its streams break off visibly; the other replicas' streams come complete; it serves again after a restart."""
    b = broken(stack, "decode dies")
    victim = stack.plan.of_role(Role.DECODE)[0].id
    flights = b.streams(4 * b.replicas)
    hit = b.on(flights, victim)
    others = [flight for flight in flights if flight not in hit]
    assert hit, f"none of {len(flights)} streams is decoded on {victim}"
    died = time.monotonic()
    stack.processes[victim].kill()
    b.told(hit, died)
    assert not all(flight.complete for flight in hit), "every stream had ended before the engine died"
    b.unharmed(others)
    during = b.meanwhile(4 * b.replicas)
    if b.replicas > 1 and not any(flight.complete for flight in during):
        b.problem("no request reached the replicas that live")
    _again(pdperf, b, victim)
    passed(b)


def test_prefill_dies(pdperf: Session, stack: Stack, broken: Break) -> None:
    """Streams whose KV has arrived go on; what it had not finished is refused; it serves again after a restart."""
    b = broken(stack, "prefill dies")
    prefills = stack.plan.of_role(Role.PREFILL)
    victim = prefills[0].id
    decoding = b.streams(b.replicas)
    waiting = b.prompts(8)
    died = time.monotonic()
    stack.processes[victim].kill()
    b.told(waiting, died)
    b.unharmed(decoding)
    during = b.meanwhile(4)
    if len(prefills) == 1 and any(flight.complete for flight in during):
        b.problem("requests came complete without any prefill engine: who computed their prompts?")
    _again(pdperf, b, victim)
    passed(b)


def _again(pdperf: Session, b: Breaking, victim: str) -> None:
    b.again(victim, pdperf.settings["startup_timeout"])
    b.recover(RECOVERY_S)
    b.clean(fresh=[victim])


def test_a_transfer_fails(stack: Stack, broken: Break) -> None:
    """Each request whose KV is lost ends as an error and is counted; requests beside and after it come complete."""
    plan = stack.plan
    if not plan.engine.simulated and not speaks_nixl(plan):
        pytest.skip(f"no way is known to make one transfer of {plan.engine.name} fail")
    b = broken(stack, "transfers fail")
    victim = plan.of_role(Role.DECODE)[0]
    others = b.streams(b.replicas)
    began = time.monotonic()
    if plan.engine.simulated:
        misbehave(victim, "transfer_fail=1")
        flights = b.send(4 * b.replicas)
        b.wait(lambda: all(flight.over for flight in flights), "clients of failed transfers know", TOLD_S)
        misbehave(victim, "")
        hit = [flight for flight in flights if not flight.complete]
        others += [flight for flight in flights if flight.complete]
    else:
        hit = b.send(4, url=victim.url, extra=nobodys_kv(plan.of_role(Role.PREFILL)[0]))
    b.told(hit, began)
    if not hit or any(flight.complete for flight in hit):
        b.problem("requests came complete although their transfers fail")
    b.unharmed(others)
    failed = b.counted(Role.DECODE, Quantity.FAILED_TRANSFERS)
    if hit and failed == 0:
        # One at least: vLLM 0.32 counts neither once a request nor once a cause.
        b.problem(f"{len(hit)} requests failed, the engines counted no failed transfer")
    b.recover()
    b.clean()
    passed(b)


def test_a_client_leaves_in_prefill(stack: Stack, broken: Break) -> None:
    """Prefill drops the prompts, nothing is left of them on either side, and running streams notice nothing."""
    b = broken(stack, "client leaves in prefill")
    others = b.streams(b.replicas)
    prompts = b.prompts(8)
    early = [flight for flight in prompts if not flight.seen]
    b.leave(early)
    assert early, "every prompt was through prefill before the client could leave"
    left = time.monotonic()
    b.told(early, left)
    b.unharmed([*others, *(flight for flight in prompts if flight not in early)])
    b.recover()
    b.clean()
    passed(b)


def test_a_client_leaves_in_decode(stack: Stack, broken: Break) -> None:
    """Decode stops and frees the blocks; the other streams of the same engines come complete."""
    b = broken(stack, "client leaves in decode")
    flights = b.streams(4 * b.replicas)
    gone, others = flights[::2], flights[1::2]
    b.leave(gone)
    left = time.monotonic()
    b.told(gone, left)
    b.unharmed(others)
    b.recover()
    b.clean()
    passed(b)


def test_a_bypass_is_seen(stack: Stack, broken: Break) -> None:
    """Through the router the counters prove every request; sent straight to decode, the same ones show none."""
    plan = stack.plan
    if not speaks_nixl(plan):
        pytest.skip(f"decode of {plan.engine.name} does not answer alone")
    decode = plan.of_role(Role.DECODE)[0]
    for fault, url, status in (
        ("through the router", "", Status.PROVEN),
        ("straight to decode", decode.url, Status.BYPASSED),
    ):
        b = broken(stack, fault)
        flights = b.send(6, url=url)
        b.unharmed(flights)
        b.clean()
        sent = Expected(
            requests=len(flights),
            prompt_tokens=sum(len(flight.prompt) for flight in flights),
            completion_tokens=sum(flight.output for flight in flights),
        )
        roles = {instance.id: instance.role for instance in plan.instances}
        evidence = judge_evidence("pd", b.before, b.after, sent, roles)
        b.report.how = evidence.summary
        if evidence.status is not status:
            b.problem(f"{fault}: want {status.value}, got {evidence.summary} ({'; '.join(evidence.reasons)})")
        if status is Status.PROVEN and evidence.transferred_tokens != sent.prompt_tokens:
            b.problem(f"{evidence.transferred_tokens} tokens transferred, {sent.prompt_tokens} sent")
        passed(b)


def test_a_slow_link(pdperf: Session, topology: Topology, broken: Break) -> None:
    """A link on which one request takes a second: the transfer takes longer, nothing else does, and nothing is lost.

    The whole stack runs in a network namespace of its own, so that nothing else on the machine is slowed. A simulated
    engine carries no KV over it: there the link that it models is slowed, and what else crosses the network only a bit.
    """
    launch = pdperf.bench.launch
    if launch.topology.env.get("UCX_TLS") is None and pdperf.settings["gpus"] not in (None, "cpu"):
        pytest.skip("KV between GPUs of one machine does not cross the loopback that could be slowed")
    kv = launch.topology.kv_transfer
    if kv is not None and kv.connector == "example":
        pytest.skip("the example connector hands KV over in files: it does not cross a network")
    with ExitStack() as exits:
        pdperf.take_down()
        try:
            net = exits.enter_context(own_network())
        except NoSlowNet as why:
            pytest.skip(f"NOT RUN: cannot slow a network down: {why}")
        exits.callback(pdperf.begin_launch, launch)
        # Shared memory would carry the KV past the network.
        pdperf.begin_launch(launch.with_env(UCX_TLS="tcp,self"))
        stack = pdperf.stack()
        assert isinstance(stack, Stack), "only what this run has launched is broken"
        b = broken(stack, "slow link")
        b.first_tokens(b.replicas)
        crossed = net.carried()
        b.first_tokens(b.replicas)
        rate = 8 * (net.carried() - crossed) / b.replicas / SLOWED_S
        rate *= 5 if stack.plan.engine.simulated else 1
        idle = b.pages()
        fast = b.first_tokens(2 * b.replicas)
        healthy = b.stages(idle, b.pages(), fast)
        others = b.streams(b.replicas, SHORT_STREAM)
        b.report.how = net.slow(bits_per_s=rate, delay_ms=DELAY_MS)
        b.unharmed(others)
        net.heal()
        idle = b.pages()
        _slow_the_model(b, healthy)
        net.slow(bits_per_s=rate, delay_ms=DELAY_MS)
        slow = b.first_tokens(2 * b.replicas)
        net.heal()
        slowed = b.stages(idle, b.pages(), slow)
        _slow_the_model(b, None)
        b.recover()
        again = b.first_tokens(2 * b.replicas)
        b.clean()
        before, after = median(fast), median(slow)
        b.report.numbers = {"ttft_s": before, "ttft_slow_s": after, "ttft_after_s": median(again)}
        if not after > 1.5 * before:
            b.problem(
                f"the link was slowed ({b.report.how}), first tokens were not: {before:.3f} s, {after:.3f} s"
            )
        if not median(again) < after:
            b.problem(
                f"first tokens stay late: {median(again):.3f} s after, {after:.3f} s while the link was slow"
            )
        _blame(b, healthy, slowed)
    passed(b)


def _slow_the_model(b: Breaking, healthy: TtftSplit | Unknown | None) -> None:
    """Slow the link that a simulated engine models, until one transfer takes as long; None makes it fast again."""
    if not b.stack.plan.engine.simulated:
        return
    took_ms = healthy.stages["transfer"] if isinstance(healthy, TtftSplit) else None
    for prefill in b.stack.plan.of_role(Role.PREFILL):
        misbehave(prefill, f"link={took_ms / 1e3 / SLOWED_S:.3g}" if took_ms else "")


def _blame(b: Breaking, healthy: TtftSplit | Unknown, slowed: TtftSplit | Unknown) -> None:
    """The stage that made first tokens late must be the transfer, where the engines time it."""
    for split in (healthy, slowed):
        if isinstance(split, Unknown) or split.stages["transfer"] is None:
            why = split.reason if isinstance(split, Unknown) else "these engines do not time transfers"
            b.report.how += f"; stage not known: {why}"
            return
    assert isinstance(healthy, TtftSplit)
    assert isinstance(slowed, TtftSplit)
    moved = moved_stage(healthy, slowed)
    for name, split in (("transfer_s", healthy), ("transfer_slow_s", slowed)):
        b.report.numbers[name] = (split.stages["transfer"] or 0.0) / 1e3
    late, share = moved.ttft_change_ms / 1e3, moved.change_ms / 1e3
    b.report.how += f"; first tokens {late:.2f} s later, {share:.2f} s of it in {moved.stage}"
    if moved.stage != "transfer":
        b.problem(f"the link was slowed, and {moved.stage} took longer: {dict(slowed.stages)} ms")
