"""What only a whole run shows: the delayed-ACK stall and a chat template's constant."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pytest_pdperf.load.exchange import End, Exchange
from pytest_pdperf.load.run_signs import nagle_warning, settle_chat
from pytest_pdperf.measure.records import RequestRecord, Status

HEAD = 1_700_000_000_000_000_000


def exchanges(gaps_ms: Sequence[float], *, reused: bool) -> list[Exchange]:
    made: list[Exchange] = []
    for gap in gaps_ms:
        e = Exchange(
            "main", len(made), False, 1, 1, status=200, end=End.COMPLETE, head_ns=HEAD, reused=reused
        )
        e.size = 5
        e.mark(HEAD + round(gap * 1e6), 0)
        made.append(e)
    return made


@pytest.mark.parametrize(
    ("reused", "fresh", "named"),
    [
        ([43, 44, 42, 50], [0.5], True),
        ([43, 44, 42, 0.4, 0.5], [], True),
        ([43, 44, 0.5, 0.4, 0.5], [0.5], False),
        ([43, 44], [0.5], False),
        ([43, 44, 42, 0.5, 0.5, 0.5], [0.5], True),
        ([43, 44, 42, 0.5, 0.5, 0.5, 0.5], [0.5], False),
        ([38, 56, 40], [0.5], True),
        ([37.9, 56.1, 40, 40], [0.5], False),
        ([43, 44, 42, 50], [44, 43], False),
        ([20, 21, 22, 20], [0.5], False),
        ([90, 91, 92, 90], [0.5], False),
    ],
)
def test_delayed_ack_signature(reused: list[float], fresh: list[float], named: bool) -> None:
    lines = nagle_warning([*exchanges(fresh, reused=False), *exchanges(reused, reused=True)], True)
    assert bool(lines) == named
    if named:
        assert "TCP_NODELAY" in lines[0] and "ms after the response head" in lines[0]


def test_exchanges_without_data_say_nothing() -> None:
    assert nagle_warning([Exchange("main", 0, False, 1, 1, reused=True)] * 5, True) == []


def chat(counted: int | None, planned: int = 10) -> RequestRecord:
    return RequestRecord("main", 0, False, Status.OK, planned, 1, 0, prompt_tokens=counted)


def test_a_template_adds_a_constant() -> None:
    assert [r.status for r in settle_chat([chat(17), chat(27, 20), chat(None)])] == [Status.OK] * 3


def test_another_surplus_is_a_wrong_length() -> None:
    *good, bad = settle_chat([chat(17), chat(17), chat(19)])
    assert [r.status for r in good] == [Status.OK] * 2
    assert bad.status is Status.WRONG_PROMPT_LENGTH
    assert bad.error == "server counted 19 prompt tokens, planned 10 plus a constant 7 of the chat template"


def test_fewer_tokens_than_words_are_wrong_for_all() -> None:
    assert {r.status for r in settle_chat([chat(8), chat(8)])} == {Status.WRONG_PROMPT_LENGTH}


def test_failures_stay_what_they_are() -> None:
    failed = RequestRecord("main", 0, False, Status.TIMEOUT, 10, 1, 0, prompt_tokens=3)
    assert settle_chat([failed, chat(17)])[0] == failed
