"""The next cell starts on idle engines or not at all."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pytest_pdperf.evidence.drain import busy_reason, judge_leak, wait_drained
from pytest_pdperf.evidence.exposition import Snapshot, Unknown, parse_exposition


def page(running: float = 0, waiting: float = 0, usage: float = 0.0, blocks: int | None = 1000) -> Snapshot:
    text = (
        f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n"
        f"vllm:kv_cache_usage_perc {usage}\n"
    )
    if blocks:
        text += f'vllm:cache_config_info{{num_gpu_blocks="{blocks}"}} 1\n'
    found = parse_exposition(text)
    assert isinstance(found, Snapshot)
    return found


class Engines:
    """Plays back pages, one a look, on a clock that only sleeping moves."""

    def __init__(self, *looks: Snapshot | Unknown) -> None:
        self.looks = looks
        self.seen = 0
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += max(seconds, 0.01)

    def scrape(self, urls: Mapping[str, str], timeout_s: float) -> Mapping[str, Snapshot | Unknown]:
        assert timeout_s == 5.0
        look = self.looks[min(self.seen, len(self.looks) - 1)]
        self.seen += 1
        return dict.fromkeys(urls, look)


def drained(
    engines: Engines, timeout_s: float = 5.0, before: Snapshot | None = None
) -> tuple[str, tuple[str, ...]]:
    found = wait_drained(
        {"decode-0": "http://127.0.0.1:1"},
        timeout_s,
        engines.clock,
        engines.sleep,
        before=None if before is None else {"decode-0": before},
        scraper=engines.scrape,
    )
    assert found.waited_s == engines.now - 100.0
    assert set(found.snapshots) == {"decode-0"}
    return found.status, found.reasons


def test_waits_for_running_and_waiting_and_looks_twice() -> None:
    engines = Engines(page(running=2), page(waiting=1), page())
    assert drained(engines) == ("drained", ())
    assert engines.seen == 4


def test_one_idle_look_between_busy_ones_is_not_enough() -> None:
    engines = Engines(page(running=1), page(), page(running=1), page())
    assert drained(engines)[0] == "drained"
    assert engines.seen == 5


def test_gives_up_at_the_deadline_and_says_who_is_busy() -> None:
    engines = Engines(page(running=2, waiting=3))
    assert drained(engines, 1.0) == ("busy", ("decode-0: running 2, waiting 3",))
    assert engines.now - 100.0 == pytest.approx(1.0)


def test_kv_usage_must_return_when_its_idle_level_is_known() -> None:
    assert drained(Engines(page(usage=0.31)))[0] == "drained"
    status, reasons = drained(Engines(page(usage=0.31)), before=page())
    assert status == "busy"
    assert reasons == ("decode-0: KV usage 0.3100, idle level 0.0000",)
    assert drained(Engines(page(usage=0.31), page(usage=0.001)), before=page())[0] == "drained"


def test_a_dark_engine_is_unknown_not_idle() -> None:
    assert drained(Engines(Unknown("connection refused")), 0.5) == (
        "unknown",
        ("decode-0: connection refused",),
    )
    gone = parse_exposition("vllm:num_requests_running 0\n")
    assert isinstance(gone, Snapshot)
    status, reasons = drained(Engines(gone), 0.5)
    assert status == "unknown"
    assert "waiting" in reasons[0]


@pytest.mark.parametrize(("usage", "busy"), [(0.1001, False), (0.101, False), (0.1011, True)])
def test_slack_is_one_block(usage: float, busy: bool) -> None:
    assert (busy_reason(page(usage=usage), page(usage=0.1)) is not None) == busy


def test_slack_without_a_known_block_is_a_hundredth() -> None:
    assert busy_reason(page(usage=0.109, blocks=None), page(usage=0.1)) is None
    assert busy_reason(page(usage=0.111, blocks=None), page(usage=0.1)) is not None


@pytest.mark.parametrize(
    ("usage", "status", "words", "next_cell"),
    [
        ((0.0, 0.31, 0.0), "fail", "stranded until timeout", True),
        ((0.0, 0.31, 0.31), "fail", "permanent leak", False),
        ((0.0, 0.0, 0.0), "pass", "back at its idle level", True),
        ((0.0, 0.01, None), "pass", "back at its idle level", True),
        ((0.0, 0.011, None), "fail", "stranded", False),
        ((0.2, 0.2, 0.2), "pass", "back at its idle level", True),
        ((None, 0.0, 0.0), "unknown", "not known", False),
    ],
)
def test_three_looks_tell_a_leak(
    usage: tuple[float | None, float | None, float | None], status: str, words: str, next_cell: bool
) -> None:
    found = judge_leak(*usage, running_plus_waiting=0)
    assert (found.status, found.next_cell_may_start) == (status, next_cell)
    assert words in found.detail


def test_usage_of_running_requests_is_no_leak_and_no_proof() -> None:
    assert judge_leak(0.0, 0.31, 0.31, running_plus_waiting=1).status == "unknown"
    assert judge_leak(0.0, 0.0, 0.0, running_plus_waiting=None).status == "unknown"


def test_where_nobody_can_be_asked_nothing_is_waited_for_and_nothing_is_known() -> None:
    found = wait_drained({}, 30.0, scraper=lambda urls, timeout_s: {})
    assert (found.status, found.waited_s) == ("unknown", None)
