"""Prompts: exact, unique where a cache could notice, and the same wherever they must be."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.load.plan import plan_cell
from pytest_pdperf.load.planned import StreamPlan
from pytest_pdperf.load.prompts import check_context, prompts_for
from pytest_pdperf.load.target import Target
from pytest_pdperf.load.words import WORDS, text_of
from pytest_pdperf.spec.workload import Cell, ClosedLoop, OpenLoop, Stream

VOCAB = (1000, 30000)
BLOCK = 16
"""Tokens of the smallest KV block that any engine caches."""


def stream(low: int = 32, high: int | None = None, *, requests: int = 8, name: str = "main") -> Stream:
    return Stream(
        name=name,
        input_tokens=(low, high or low),
        output_tokens=4,
        requests=requests,
        arrival=ClosedLoop(concurrency=1),
    )


def cell(id_: str, *streams: Stream, warmups: int = 4) -> Cell:
    return Cell(workload="w", id=id_, streams=streams or (stream(),), warmups=warmups)


@given(
    low=st.integers(2, 50),
    extra=st.integers(0, 50),
    requests=st.integers(1, 60),
    span=st.integers(8, 400),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=60)
def test_exact_unique_and_within_the_vocabulary(
    low: int, extra: int, requests: int, span: int, seed: int
) -> None:
    prompts = prompts_for(
        stream(low, low + extra, requests=requests), seed=seed, salt="s", vocab=(100, 100 + span)
    )
    assert len(prompts) == requests
    assert all(low <= len(p) <= low + extra for p in prompts)
    assert all(100 <= token < 100 + span for p in prompts for token in p)
    heads = {p[: 1 if span >= requests else 2] for p in prompts}
    assert len(heads) == requests


def test_lengths_of_a_range_reach_both_ends() -> None:
    lengths = [len(p) for p in prompts_for(stream(4, 6, requests=200), seed=1, salt="s", vocab=VOCAB)]
    assert set(lengths) == {4, 5, 6}
    assert all(40 < lengths.count(n) < 95 for n in (4, 5, 6))


def test_same_key_same_prompts_and_any_other_key_others() -> None:
    base = prompts_for(stream(), seed=1, salt="run/w/c", vocab=VOCAB)
    assert prompts_for(stream(), seed=1, salt="run/w/c", vocab=VOCAB) == base
    for other in (
        prompts_for(stream(), seed=2, salt="run/w/c", vocab=VOCAB),
        prompts_for(stream(), seed=1, salt="run/w/d", vocab=VOCAB),
        prompts_for(stream(name="b"), seed=1, salt="run/w/c", vocab=VOCAB),
    ):
        assert not {p[:2] for p in other} & {p[:2] for p in base}


def test_known_answer() -> None:
    """Prompts are part of a baseline: a change of generator or of numpy must not go unseen."""
    (prompt,) = prompts_for(stream(6, requests=1), seed=7, salt="known", vocab=VOCAB)
    assert prompt == KNOWN


KNOWN = (1260, 8613, 21570, 18920, 7764, 12897)


def test_a_sweep_shares_no_first_block_between_cells_warmups_and_runs() -> None:
    """One seed, cells c1 and c4, their warm-ups, and a second run: all prompts differ inside the first block."""
    target = Target("http://h", "m", vocab=VOCAB)
    seen: set[tuple[int, ...]] = set()
    total = 0
    for salt in ("run-1", "run-2"):
        for id_ in ("c1", "c4"):
            (plan,) = plan_cell(cell(id_, stream(requests=3), warmups=2), target, seed=42, salt=salt)
            prompts = [r.prompt for r in (*plan.requests, *plan.warmups)]
            seen |= {p[:BLOCK] for p in prompts}
            total += len(prompts)
    assert len(seen) == total == 20


def test_both_arms_get_the_same_list() -> None:
    """Nothing that tells topologies apart (URL, api, policy) moves a prompt."""
    one = plan_cell(cell("c"), Target("http://pd:1", "m", api="generate"), seed=1, salt="r")
    two = plan_cell(cell("c"), Target("http://agg:2", "m", quick_ack=False), seed=1, salt="r")
    assert one == two


def test_every_run_has_the_same_burst_lengths_and_send_times_and_none_the_same_prompts() -> None:
    mixed = cell("c", stream(16), stream(40, 90, requests=30, name="burst"), arriving(20))
    one, two = (
        plan_cell(mixed, Target("http://h", "m"), seed=1, salt=salt) for salt in ("night-1", "night-2")
    )
    other = plan_cell(mixed, Target("http://h", "m"), seed=2, salt="night-1")

    def shape(plans: tuple[StreamPlan, ...]) -> list[tuple[int, float | None]]:
        return [(len(r.prompt), r.at_s) for plan in plans for r in plan.requests]

    assert shape(one) == shape(two) != shape(other)
    assert len({len(r.prompt) for r in one[1].requests}) > 10
    said = [{r.prompt for plan in plans for r in plan.requests} for plans in (one, two)]
    assert not said[0] & said[1]


def arriving(requests: int) -> Stream:
    return Stream(
        name="open",
        input_tokens=(8, 8),
        output_tokens=1,
        requests=requests,
        arrival=OpenLoop(rate_rps=10, process="poisson"),
    )


def test_global_random_generators_are_left_alone() -> None:
    """A tool that seeds the global generator can make two router processes draw equal bootstrap rooms."""
    random.seed(5)
    np.random.seed(5)
    expected = (random.random(), float(np.random.random()))
    random.seed(5)
    np.random.seed(5)
    prompts_for(stream(), seed=5, salt="s", vocab=VOCAB)
    assert (random.random(), float(np.random.random())) == expected


def test_prompts_too_short_to_differ_are_refused() -> None:
    with pytest.raises(UsageProblem, match="9 prompts of 1 tokens cannot all differ with 8 token ids"):
        prompts_for(stream(1, requests=9), seed=1, salt="s", vocab=(0, 8))
    assert len(set(prompts_for(stream(1, requests=8), seed=1, salt="s", vocab=(0, 8)))) == 8


def test_context_overflow_is_refused_before_sending() -> None:
    fits = cell(
        "c",
        Stream(input_tokens=(7700, 7700), output_tokens=1300, requests=1, arrival=ClosedLoop(concurrency=1)),
    )
    check_context(fits, 9000)
    check_context(fits, None)
    over = Stream(
        input_tokens=(3050, 9150), output_tokens=1300, requests=1, arrival=ClosedLoop(concurrency=1)
    )
    with pytest.raises(
        UsageProblem, match=r"cell 'c': up to 10450 tokens .* context of 9000; raise max_model_len"
    ):
        plan_cell(cell("c", over), Target("http://h", "m", max_context=9000), seed=1, salt="r")
    with pytest.raises(UsageProblem, match="up to 9001 tokens"):
        check_context(fits.model_copy(update={"streams": (stream(7701),)}), 9000, 9001)


def test_warmups_are_dealt_to_every_stream() -> None:
    plans = plan_cell(
        cell("c", stream(), stream(name="b"), warmups=3), Target("http://h", "m"), seed=1, salt="r"
    )
    assert [len(p.warmups) for p in plans] == [2, 1]


def test_plans_of_open_loops_have_send_times() -> None:
    arriving = Stream(
        input_tokens=(8, 8), output_tokens=1, requests=3, arrival=OpenLoop(rate_rps=10, process="constant")
    )
    (plan,) = plan_cell(cell("c", arriving), Target("http://h", "m"), seed=1, salt="r")
    assert plan.concurrency is None
    assert [r.at_s for r in plan.requests] == pytest.approx([0.0, 0.1, 0.2])


def test_text_has_one_word_a_token() -> None:
    assert len(set(WORDS)) == len(WORDS) == 256
    assert len(text_of(range(1000, 1050)).split()) == 50
    assert len(set(text_of(range(1000, 1256)).split())) > 100


def test_planned_lengths_reach_both_ends_of_their_range_and_no_further() -> None:
    (plan,) = plan_cell(
        cell("c", stream(4, 6, requests=200), warmups=1), Target("http://h", "m"), seed=1, salt="r"
    )
    assert {len(r.prompt) for r in plan.requests} == {4, 5, 6}
    assert {len(r.prompt) for r in plan.warmups} == {6}


def test_think_time_belongs_to_closed_loops() -> None:
    thinking = stream().model_copy(update={"arrival": ClosedLoop(concurrency=1, think_s=1.5)})
    opened = stream(name="b").model_copy(update={"arrival": OpenLoop(rate_rps=1)})
    plans = plan_cell(cell("c", thinking, opened), Target("http://h", "m"), seed=1, salt="r")
    assert [(p.concurrency, p.think_s) for p in plans] == [(1, 1.5), (None, 0.0)]
