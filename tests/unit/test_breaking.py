"""A broken stack that never gets well: every wait ends, and the report says which did not come true."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from pytest_pdperf.breaking import ENDS_S, LONGEST_HOLD_S, PATIENCE_S, Breaking, hold_s
from pytest_pdperf.stack.launch import Stack
from pytest_pdperf.stack.plan import LaunchPlan

HOLD_S = 7.0


class Clock:
    """Runs while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 5.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("pytest_pdperf.breaking.time.sleep", clock.sleep)
    return clock


@pytest.fixture
def sick(clock: Clock) -> Iterator[Breaking]:
    prefill = SimpleNamespace(id="prefill-0", args={"kv_lease_s": HOLD_S}, env={})
    plan = SimpleNamespace(
        topology=SimpleNamespace(name="t", kv_transfer=None),
        engine=SimpleNamespace(name="sim", simulated=True),
        prompt_forms=lambda: frozenset({"token_ids"}),
        of_role=lambda role: (prefill,),
        instances=(prefill,),
    )
    stack = SimpleNamespace(
        plan=plan,
        role_urls={},
        url="http://127.0.0.1:9",
        model="m",
        hangs=None,
        restart=lambda *_, **__: 500.0,
    )
    with Breaking(cast(Stack, stack), "all is lost", clock=clock) as b:
        yield b


def test_a_wait_ends_and_says_for_what(sick: Breaking, clock: Clock) -> None:
    began = clock()
    assert not sick.wait(lambda: False, "the moon")
    assert PATIENCE_S < clock() - began <= PATIENCE_S + 10.0
    assert sick.report.problems == [f"not within {PATIENCE_S:g} s: the moon"]


def test_waits_end_together_after_the_time_of_the_whole_test(sick: Breaking, clock: Clock) -> None:
    began = clock()
    for _ in range(20):
        sick.wait(lambda: False, "the moon")
    sick.recover(1e6)
    assert ENDS_S + HOLD_S < clock() - began <= ENDS_S + HOLD_S + 22 * 5.0
    assert sick.report.problems[-2] == "not within the time of the whole test: the moon"
    assert sick.report.problems[-1].startswith("not recovered within")
    assert sick.report.recovered_s is None


def test_the_start_of_an_engine_takes_nothing_off_the_time(sick: Breaking, clock: Clock) -> None:
    clock.now += ENDS_S
    sick.again("prefill-0", 900.0)
    clock.now += 400.0
    began = clock()
    sick.wait(lambda: False, "the moon")
    assert clock() - began > PATIENCE_S
    assert sick.report.restarted_s == 500.0


@pytest.mark.parametrize(
    ("engine", "connector", "env", "args", "seconds"),
    [
        ("sim", "nixl", {}, {}, 30.0),
        ("sim-sglang", "mooncake", {}, {}, 30.0),
        ("sim", "nixl", {}, {"kv_lease_s": 1}, 1.0),
        ("vllm", "nixl", {}, {}, 30.0),
        ("vllm", "nixl", {"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "90"}, {}, 90.0),
        ("vllm", "nixl", {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "90"}, {}, 30.0),
        ("vllm", "mooncake", {}, {}, 480.0),
        ("vllm", "mooncake", {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "90"}, {}, 90.0),
        ("sglang", "nixl", {}, {}, LONGEST_HOLD_S),
    ],
)
def test_kv_that_nobody_fetches_may_stay_as_long_as_the_connector_was_told(
    engine: str, connector: str, env: dict[str, str], args: dict[str, object], seconds: float
) -> None:
    prefill = SimpleNamespace(args=args, env=env)
    plan = SimpleNamespace(
        topology=SimpleNamespace(kv_transfer=SimpleNamespace(connector=connector)),
        engine=SimpleNamespace(name=engine, simulated=engine.startswith("sim")),
        of_role=lambda role: (prefill,),
    )
    assert hold_s(cast(LaunchPlan, plan)) == seconds
