"""The step scheduler against properties that hold for every load, and against hand-made cases."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_pdperf.engines.sim.faults import Faults
from pytest_pdperf.engines.sim.profile import FAST, H100_QWEN3_32B
from pytest_pdperf.engines.sim.scheduler import StepScheduler
from pytest_pdperf.engines.sim.sequence import Sequence, State, Step

BUDGET = 64
SEQS = 4
BLOCKS = 60


@dataclass(frozen=True)
class Job:
    at: float
    prompt: int
    output: int
    kv_ready: bool
    hold: bool
    leaks: bool
    cancel_after: float | None


JOBS = st.lists(
    st.builds(
        Job,
        at=st.floats(0, 0.3),
        prompt=st.integers(1, 200),
        output=st.integers(1, 30),
        kv_ready=st.booleans(),
        hold=st.booleans(),
        leaks=st.just(False),
        cancel_after=st.none() | st.floats(0, 0.2),
    ),
    min_size=1,
    max_size=12,
)


def scheduler(**options: object) -> StepScheduler:
    noise = Random(1)
    given: dict[str, object] = {"max_seqs": SEQS, "token_budget": BUDGET, "kv_blocks": BLOCKS} | options
    return StepScheduler(FAST, noise=lambda: 1.0 + abs(noise.gauss(0, 0.004)), **given)  # type: ignore[arg-type]


def drain(engine: StepScheduler, limit: int = 100_000) -> list[Step]:
    """Run until nothing is left to do."""
    steps: list[Step] = []
    while (due := engine.next_time()) is not None:
        steps += engine.advance(due)
        assert len(steps) < limit
    return steps


def play(jobs: list[Job]) -> tuple[StepScheduler, list[Sequence], list[Step]]:
    """Run jobs to the end, doing everything at its time."""
    engine = scheduler()
    steps: list[Step] = []
    sequences: list[Sequence] = []
    wanting: list[tuple[Job, Sequence]] = []
    events: list[tuple[float, int, str]] = []
    for i, job in enumerate(jobs):
        sequences.append(
            Sequence(job.prompt, job.output, kv_ready=job.kv_ready, hold=job.hold, leaks=job.leaks)
        )
        events.append((job.at, i, "submit"))
        if job.cancel_after is not None:
            events.append((job.at + job.cancel_after, i, "cancel"))
    events.sort()

    def admit(now: float) -> None:
        for item in list(wanting):
            if item[1].state is State.NEW and not engine.reserve(item[1]):
                break
            wanting.remove(item)
            if item[1].state is State.NEW:
                engine.submit(item[1], now)

    def let_go(now: float) -> None:
        for seq in sequences:
            engine.release(seq, now)
        admit(now)

    now = 0.0
    while events or engine.next_time() is not None or wanting:
        due = [t for t in (events[0][0] if events else None, engine.next_time()) if t is not None]
        assert due, "stuck: blocks are wanted and nothing will free them"
        now = max(now, min(due))
        while events and events[0][0] <= now:
            at, i, what = events.pop(0)
            steps += engine.advance(at)
            if what == "cancel":
                wanting[:] = [item for item in wanting if item[1] is not sequences[i]]
                engine.cancel(sequences[i], now)
            elif sequences[i].state is State.NEW:
                if jobs[i].kv_ready:
                    wanting.append((jobs[i], sequences[i]))
                    admit(at)
                else:
                    engine.submit(sequences[i], at)
        steps += engine.advance(now)
        let_go(now)
        assert len(steps) < 100_000
    return engine, sequences, steps


@given(JOBS)
@settings(max_examples=150, deadline=None)
def test_every_load_keeps_the_books(jobs: list[Job]) -> None:
    engine, sequences, steps = play(jobs)
    emitted: Counter[int] = Counter()
    for step in steps:
        assert step.end_s > step.start_s
        assert step.prefill_tokens + step.decoding <= BUDGET
        assert len(step.emitted) <= SEQS
        assert set(step.first) <= set(step.emitted) and set(step.finished) <= set(step.emitted)
        for seq in step.emitted:
            assert step.number - seq.first_step == emitted[id(seq)], "tokens come in order, one a step"
            emitted[id(seq)] += 1
    for before, after in pairwise(steps):
        assert after.number == before.number + 1
        assert after.start_s >= before.end_s
    for job, seq in zip(jobs, sequences, strict=True):
        if job.cancel_after is None:
            assert emitted[id(seq)] == job.output
            assert seq.state is State.DONE
        else:
            assert emitted[id(seq)] <= job.output
    computed = sum(step.prefill_tokens for step in steps)
    owed = sum(job.prompt for job in jobs if not job.kv_ready and job.cancel_after is None)
    at_most = sum(job.prompt for job in jobs if not job.kv_ready)
    assert owed <= computed <= at_most
    assert engine.used_blocks == 0
    assert engine.idle
    assert engine.running == engine.waiting == 0


@given(
    st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 200), st.integers(1, 30)), min_size=1, max_size=8),
    st.floats(0.001, 0.5),
)
@settings(max_examples=80, deadline=None)
def test_a_late_caller_changes_no_step(jobs: list[tuple[float, int, int]], stride: float) -> None:
    punctual, late = scheduler(kv_blocks=500), scheduler(kv_blocks=500)
    for at, prompt, output in sorted(jobs):
        punctual.submit(Sequence(prompt, output), at)
    expected = [(s.start_s, s.end_s, s.prefill_tokens, s.decoding) for s in drain(punctual)]
    steps: list[Step] = []
    waiting = sorted(jobs)
    now = 0.0
    while waiting or late.next_time() is not None:
        now += stride
        while waiting and waiting[0][0] <= now:
            at, prompt, output = waiting.pop(0)
            late.submit(Sequence(prompt, output), at)
        steps += late.advance(now)
    assert [(s.start_s, s.end_s, s.prefill_tokens, s.decoding) for s in steps] == expected


@given(
    st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 100), st.integers(1, 60)), min_size=1, max_size=4)
)
@settings(max_examples=80, deadline=None)
def test_skipping_quiet_steps_gives_the_same_ends(jobs: list[tuple[float, int, int]]) -> None:
    one, other = scheduler(kv_blocks=200), scheduler(kv_blocks=200)
    for at, prompt, output in jobs:
        one.submit(Sequence(prompt, output), at)
        other.submit(Sequence(prompt, output), at)
    plain = [step.end_s for step in drain(one)]
    ends: list[float] = []
    while (due := other.next_time()) is not None:
        if not other.skip(due + 0.1, ends):
            ends += [step.end_s for step in other.advance(due)]
    assert ends == plain


@given(
    st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 100), st.integers(1, 60)), min_size=1, max_size=6),
    st.sampled_from(["", "throttle=0.5:0.1", "throttle=2:0.1", "decode_step=0.7"]),
)
@settings(max_examples=80, deadline=None)
def test_no_sequence_begins_or_ends_before_the_quiet_is_over(
    jobs: list[tuple[float, int, int]], fault: str
) -> None:
    engine = scheduler(kv_blocks=200, faults=Faults.parse(fault))
    for at, prompt, output in jobs:
        engine.submit(Sequence(prompt, output), at)
    promised = 0.0
    while (due := engine.next_time()) is not None:
        bound = engine.quiet_until()
        assert bound >= due
        promised = max(promised, bound)
        for step in engine.advance(due):
            if step.finished or step.first:
                assert step.end_s >= promised - 1e-12
                promised = 0.0
    assert engine.quiet_until() == float("inf")


def test_quiet_lasts_for_nearly_all_of_a_long_answer() -> None:
    engine = StepScheduler(FAST)
    engine.submit(Sequence(16, 100), 0.0)
    engine.advance(0.0)
    due = engine.next_time()
    assert due is not None
    engine.advance(due)
    assert engine.quiet_until() == pytest.approx(due + 99 * 0.005, rel=0.01)


def test_skipping_stops_where_the_throttle_begins() -> None:
    def run(*, skip: bool) -> list[float]:
        engine = StepScheduler(FAST, faults=Faults.parse("throttle=3:0.05"))
        engine.submit(Sequence(16, 40), 0.0)
        ends: list[float] = []
        while (due := engine.next_time()) is not None:
            if not (skip and engine.skip(10.0, ends)):
                ends += [step.end_s for step in engine.advance(due)]
        return ends

    plain = run(skip=False)
    assert run(skip=True) == plain
    gaps = [b - a for a, b in pairwise(plain)]
    assert gaps[-1] == pytest.approx(3 * gaps[0], rel=0.01)


def test_lengths_of_single_steps_follow_the_formula() -> None:
    profile = H100_QWEN3_32B
    engine = StepScheduler(profile)
    engine.submit(Sequence(4096, 3), 1.0)
    prefill, first, second = drain(engine)
    assert prefill.start_s == 1.0
    assert prefill.end_s - 1.0 == pytest.approx(5.7e-05 * 4096 + 7.97724106205121e-10 * 4096**2)
    assert first.end_s - first.start_s == pytest.approx(0.01335 + 5.375663934491907e-08 * 4097)
    assert second.end_s - second.start_s == pytest.approx(0.01335 + 5.375663934491907e-08 * 4098)


def test_a_step_that_mixes_prefill_and_decode_has_no_decode_floor() -> None:
    profile = H100_QWEN3_32B
    engine = StepScheduler(profile)
    engine.submit(Sequence(100, 50), 0.0)
    engine.submit(Sequence(2000, 1), 0.1)
    mixed = next(step for step in drain(engine) if step.prefill_tokens and step.decoding)
    generated = mixed.number  # the first sequence has one token for each step before
    expected = (
        profile.prefill_s(2000) + profile.decode_sequence_s + profile.decode_context_s * (100 + generated)
    )
    assert mixed.end_s - mixed.start_s == pytest.approx(expected)
    assert mixed.end_s - mixed.start_s > profile.prefill_floor_s


def test_a_long_prompt_is_cut_into_chunks_that_cost_by_position() -> None:
    engine = StepScheduler(H100_QWEN3_32B, token_budget=1000)
    engine.submit(Sequence(2500, 1), 0.0)
    steps = drain(engine)
    assert [step.prefill_tokens for step in steps] == [1000, 1000, 500]
    assert [len(step.emitted) for step in steps] == [0, 0, 1]
    assert steps[1].end_s - steps[1].start_s == pytest.approx(H100_QWEN3_32B.prefill_s(1000, 1000))
    assert H100_QWEN3_32B.prefill_s(1000, 1000) > H100_QWEN3_32B.prefill_s(1000)
    total = sum(H100_QWEN3_32B.prefill_s(n, s) for n, s in ((1000, 0), (1000, 1000), (500, 2000)))
    assert total == pytest.approx(H100_QWEN3_32B.prefill_s(2500))


def test_decoding_sequences_take_their_tokens_from_the_budget_first() -> None:
    engine = StepScheduler(FAST, token_budget=100)
    for _ in range(3):
        engine.submit(Sequence(10, 100), 0.0)
    engine.submit(Sequence(150, 1), 0.1)
    mixed = [step for step in drain(engine) if step.prefill_tokens and step.decoding]
    assert [(step.prefill_tokens, step.decoding) for step in mixed] == [(97, 3), (53, 3)]


def test_no_more_sequences_run_than_allowed_and_the_rest_keep_their_order() -> None:
    engine = StepScheduler(FAST, max_seqs=2)
    sequences = [Sequence(10, 5) for _ in range(5)]
    for seq in sequences:
        engine.submit(seq, 0.0)
    engine.advance(0.0)
    assert (engine.running, engine.waiting) == (2, 3)
    drain(engine)
    assert [s.first_step for s in sequences] == sorted(s.first_step for s in sequences)
    assert sequences[2].first_step == sequences[0].first_step + 5


def test_a_sequence_waits_for_blocks_and_starts_when_a_held_one_lets_go() -> None:
    engine = StepScheduler(FAST, kv_blocks=10)
    held, waiting = Sequence(100, 1, hold=True), Sequence(100, 1)
    engine.submit(held, 0.0)
    engine.submit(waiting, 0.0)
    drain(engine)
    assert held.state is State.HELD
    assert waiting.state is State.QUEUED
    assert engine.used_blocks == 7
    assert engine.next_time() is None
    engine.release(held, 5.0)
    assert engine.next_time() == 5.0
    (step,) = drain(engine)
    assert step.start_s == 5.0
    assert step.finished == [waiting]
    assert engine.used_blocks == 0


def test_an_idle_engine_never_starts_before_its_last_step_ended() -> None:
    engine = StepScheduler(FAST)
    engine.submit(Sequence(100, 1), 1.0)
    (first,) = engine.advance(2.0)
    engine.submit(Sequence(100, 1), first.end_s - 0.001)
    (second,) = engine.advance(3.0)
    assert second.start_s == first.end_s


def test_usage_grows_with_the_tokens_and_returns_to_zero() -> None:
    engine = StepScheduler(FAST)
    engine.submit(Sequence(16, 33), 0.0)
    seen = []
    while (due := engine.next_time()) is not None:
        engine.advance(due)
        seen.append(engine.used_blocks)
    assert max(seen) == 3
    assert sorted(seen[:-1]) == seen[:-1]
    assert seen[-1] == 0


def test_cancelling_frees_everything_and_shortens_the_next_step() -> None:
    profile = H100_QWEN3_32B
    engine = StepScheduler(profile)
    stays, goes = Sequence(64, 40), Sequence(6400, 40)
    engine.submit(stays, 0.0)
    engine.submit(goes, 0.0)
    for _ in range(5):
        due = engine.next_time()
        assert due is not None
        engine.advance(due)
    engine.cancel(goes, 1.0)
    assert goes.state is State.CANCELLED
    cut, after, *_ = drain(engine)
    assert goes not in cut.emitted
    assert after.end_s - after.start_s == pytest.approx(
        profile.decode_s(1, 64 + after.number - stays.first_step)
    )
    assert engine.used_blocks == 0


def test_leaked_blocks_stay() -> None:
    engine = StepScheduler(FAST, kv_blocks=10)
    engine.submit(Sequence(100, 1, leaks=True), 0.0)
    drain(engine)
    assert engine.used_blocks == 7
    assert engine.kv_usage == pytest.approx(0.7)
    engine.submit(Sequence(100, 1), 1.0)
    drain(engine)
    assert engine.waiting == 1, "three blocks are not enough"


def test_a_sequence_is_submitted_once_and_needs_tokens() -> None:
    engine = StepScheduler(FAST)
    seq = Sequence(10, 1)
    engine.submit(seq, 0.0)
    with pytest.raises(ValueError, match="once"):
        engine.submit(seq, 0.0)
    with pytest.raises(ValueError, match="0/1"):
        Sequence(0, 1)


@pytest.mark.parametrize(
    ("fault", "prefill", "decode"),
    [("decode_step=1.5", 1.0, 1.5), ("prefill=1.3", 1.3, 1.0), ("throttle=2", 2.0, 2.0)],
)
def test_slow_engines_are_slow_where_they_should_be(fault: str, prefill: float, decode: float) -> None:
    def lengths(faults: Faults) -> list[float]:
        engine = StepScheduler(H100_QWEN3_32B, faults=faults)
        engine.submit(Sequence(4096, 2), 0.0)
        return [step.end_s - step.start_s for step in drain(engine)]

    healthy, slow = lengths(Faults()), lengths(Faults.parse(fault))
    assert slow[0] == pytest.approx(prefill * healthy[0])
    assert slow[1] == pytest.approx(decode * healthy[1])


def test_what_is_loaded_is_not_computed_but_takes_its_blocks() -> None:
    engine = scheduler()
    seq = Sequence(100, 2, loaded=96)
    engine.submit(seq, 0.0)
    (first, second) = drain(engine)
    assert (first.prefill_tokens, second.prefill_tokens) == (4, 0), "of 100 tokens, within a budget of 64"
    assert seq.state is State.DONE
    assert engine.used_blocks == 0
