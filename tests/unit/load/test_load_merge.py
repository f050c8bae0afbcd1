"""Several client processes leave the record that one would have left."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_pdperf.load.merge import merge, most_in_flight
from pytest_pdperf.load.planned import Planned, StreamPlan
from pytest_pdperf.load.results import read_records, store_records
from pytest_pdperf.load.shares import Share, Tickets, Turns
from pytest_pdperf.measure.records import CellRecords, RequestRecord, Status


def plan(name: str, requests: int, clients: int | None, warmups: int = 0) -> StreamPlan:
    made = tuple(Planned((i,), 4, None if clients else i / 10) for i in range(requests))
    return StreamPlan(name, made, made[:warmups], clients)


def record(
    index: int, sent: int, end: int | None, stream: str = "main", warmup: bool = False
) -> RequestRecord:
    stamps = (sent + 1, sent + 3)
    return RequestRecord(
        stream,
        index,
        warmup,
        Status.OK,
        1,
        4,
        sent,
        end_ns=end,
        event_ns=stamps,
        event_lag_ns=(index, 7),
        event_tokens=(1, 1),
    )


def part(requests: Sequence[RequestRecord], **changes: object) -> CellRecords:
    known: dict[str, object] = {"stamp_source": "kernel", "started_ns": 5, "ended_ns": 90}
    return CellRecords(requests=tuple(requests), **(known | changes))  # type: ignore[arg-type]


def swept(requests: Sequence[RequestRecord]) -> int:
    """Open requests just after each sending: the slow and obvious way."""
    return max((sum(o.sent_ns <= r.sent_ns < (o.end_ns or 0) for o in requests) for r in requests), default=0)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=24),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_merged_parts_are_the_whole(spans: list[tuple[int, int]], processes: int, rng: random.Random) -> None:
    """However a stream's records are dealt: the same requests in the same order, lag and all, and the true peak."""
    records = [record(i, at, at + length) for i, (at, length) in enumerate(spans)]
    owners = [rng.randrange(processes) for _ in records]
    parts = [
        part(
            [r for r, owner in zip(records, owners, strict=True) if owner == k],
            client_cpu_s=0.5 + k,
            merged_segments=k,
            started_ns=5 + k,
            ended_ns=90 - k,
        )
        for k in range(processes)
    ]
    plans = [plan("main", len(records), 1)]
    whole = merge(parts, plans)
    assert whole.requests == tuple(records)
    assert whole.reached_concurrency == {"main": swept(records)}
    assert whole.max_in_flight == swept(records)
    assert whole.client_cpu_s == sum(p.client_cpu_s for p in parts)
    assert whole.merged_segments == sum(range(processes))
    assert (whole.started_ns, whole.ended_ns) == (5, 90)
    assert whole.client_processes == processes
    assert merge([part(records)], plans).requests == whole.requests


def test_warm_ups_first_then_streams_as_planned_and_only_measured_requests_count_as_open() -> None:
    plans = [plan("steady", 2, 1, warmups=1), plan("burst", 1, None)]
    first = [record(1, 20, 30, "steady"), record(0, 0, 99, "steady", warmup=True)]
    second = [record(0, 25, 40, "burst"), record(0, 10, 20, "steady")]
    whole = merge([part(first), part(second)], plans)
    assert [(r.stream, r.index, r.warmup) for r in whole.requests] == [
        ("steady", 0, True),
        ("steady", 0, False),
        ("steady", 1, False),
        ("burst", 0, False),
    ]
    assert whole.reached_concurrency == {"steady": 1, "burst": 1}
    assert whole.max_in_flight == 2


def test_user_stamps_of_one_process_are_the_cells_and_warnings_say_whose_they_are() -> None:
    plans = [plan("main", 2, 1)]
    one = part([record(0, 0, 5)], warnings=("both", "mine"))
    two = part([record(1, 0, 5)], warnings=("both",), stamp_source="user")
    whole = merge([one, two], plans)
    assert whole.stamp_source == "user"
    assert whole.warnings == ("both", "client process 1 of 2: mine")


def test_lost_and_doubled_requests_are_no_result() -> None:
    plans = [plan("main", 2, 1)]
    both = [record(0, 0, 5), record(1, 0, 5)]
    with pytest.raises(ValueError, match=r"sent request main\[1\] 0 times"):
        merge([part(both[:1]), part([])], plans)
    with pytest.raises(ValueError, match=r"sent request main\[0\] 2 times"):
        merge([part(both), part(both[:1])], plans)
    with pytest.raises(ValueError, match="nobody planned"):
        merge([part([*both, record(2, 0, 5)])], plans)
    with pytest.raises(ValueError, match=r"main\[warm-up 0\] 0 times"):
        merge([part(both)], [plan("main", 2, 1, warmups=1)])


def test_a_request_that_was_never_open_does_not_count() -> None:
    assert most_in_flight([record(0, 5, 5), record(1, 5, None)]) == 0
    assert most_in_flight([record(0, 5, 9), record(1, 9, 12)]) == 1
    assert most_in_flight([record(0, 5, 9), record(1, 8, 12)]) == 2


def test_merged_records_are_stored_like_any_others(tmp_path: Path) -> None:
    whole = merge(
        [part([record(0, 0, 5)], client_cores="2-3"), part([record(1, 2, 9)])], [plan("main", 2, 2)]
    )
    store_records(tmp_path, whole)
    assert read_records(tmp_path) == whole
    assert whole.client_cores == "2-3"


@given(
    st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=4),
    st.integers(1, 9),
)
@settings(max_examples=60)
def test_every_client_and_every_open_loop_request_is_dealt_once(
    clients: list[int | None], processes: int
) -> None:
    plans = [plan(f"s{i}", 50, n) for i, n in enumerate(clients)]
    totals = Counter[int]()
    before = 0
    for one in plans:
        shares = [Share(k, processes).clients(one, before) for k in range(processes)]
        before += one.concurrency or 0
        if one.concurrency is None:
            assert shares == [None] * processes
            dealt = [list(Share(k, processes).dealt(50)) for k in range(processes)]
            assert sorted(i for positions in dealt for i in positions) == list(range(50))
            assert all(b - a == processes for p in dealt for a, b in itertools.pairwise(p))
        else:
            assert sum(n or 0 for n in shares) == one.concurrency
            totals.update({k: n or 0 for k, n in enumerate(shares)})
    loads = [totals[k] for k in range(processes)]
    assert max(loads) - min(loads) <= 1


def test_tickets_of_two_holders_are_one_pile(tmp_path: Path) -> None:
    fd = Tickets.open(tmp_path / "pile", 5)
    other = os.dup(fd)
    try:
        one, two = Tickets(fd), Tickets(other)
        assert [one.take(), two.take(), two.take(), one.take(), two.take()] == [0, 1, 2, 3, 4]
        assert (one.take(), two.take()) == (None, None)
    finally:
        os.close(fd)
        os.close(other)
    assert not list(tmp_path.iterdir())


def test_turns_end() -> None:
    turns = Turns([3, 4])
    assert [turns.take() for _ in range(4)] == [3, 4, None, None]


def test_the_default_share_is_everything() -> None:
    alone = Share()
    assert list(alone.dealt(3)) == [0, 1, 2]
    assert alone.clients(replace(plan("main", 8, 8), concurrency=7), before=5) == 7
