"""A launch in a thread is handed over, or called off, exactly once and whatever its end is."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_pdperf.errors import BringUpError
from pytest_pdperf.stack.beside import LaunchBeside
from pytest_pdperf.stack.launch import Stack
from pytest_pdperf.stack.plan import LaunchPlan

PLAN = cast(LaunchPlan, SimpleNamespace(topology=SimpleNamespace(name="b")))


class FakeStack:
    closed = 0

    def close(self) -> tuple[str, ...]:
        self.closed += 1
        return ("decode-0: pid 7 (state D)",)


class Launching:
    """A bring-up that ends when the test says so."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        self.stack, self.error = FakeStack(), error
        self.asked: dict[str, Any] = {}

    def __call__(
        self,
        plan: LaunchPlan,
        *,
        called_off: Callable[[], bool],
        progress: Callable[[str], None],
        **asked: Any,
    ) -> Stack:
        self.asked = asked
        progress("on its way")
        self.began.set()
        while not self.go.wait(0.01):
            if called_off():
                raise BringUpError("called off")
        if self.error is not None:
            raise self.error
        return cast(Stack, self.stack)


def beside(launching: Launching) -> LaunchBeside:
    found = LaunchBeside(PLAN, deadline_s=5.0, launch=launching)
    found.start()
    assert launching.began.wait(30)
    return found


def test_the_stack_is_handed_over_once_and_is_then_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDPERF_TEST", "then")
    launching = Launching()
    found = beside(launching)
    monkeypatch.setenv("PDPERF_TEST", "now")
    assert found.coming_up
    launching.go.set()
    assert found.result() is cast(Stack, launching.stack)
    assert not found.coming_up
    assert found.said == ["on its way"]
    assert found.drop() == ()
    assert launching.stack.closed == 0
    assert launching.asked["deadline_s"] == 5.0
    assert launching.asked["base"]["PDPERF_TEST"] == "then"
    assert os.environ["PDPERF_TEST"] == "now"


def test_what_the_bring_up_raised_is_raised_by_the_hand_over() -> None:
    launching = Launching(BringUpError("decode-0 ended"))
    found = beside(launching)
    launching.go.set()
    with pytest.raises(BringUpError, match="decode-0 ended"):
        found.result()
    assert found.drop() == ()


def test_a_drop_calls_off_what_is_coming_up() -> None:
    found = beside(Launching())
    assert found.drop() == ()
    assert not found.coming_up
    with pytest.raises(BringUpError, match="called off"):
        found.result()


def test_a_drop_takes_down_what_has_come_up_and_tells_what_is_left() -> None:
    launching = Launching()
    found = beside(launching)
    launching.go.set()
    while found.coming_up:
        pass
    assert found.drop() == ("decode-0: pid 7 (state D)",)
    assert found.drop() == ()
    assert launching.stack.closed == 1


def test_a_ctrl_c_while_dropping_waits_for_the_end_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = beside(Launching())
    join, interrupts = threading.Thread.join, [KeyboardInterrupt(), KeyboardInterrupt()]

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if interrupts:
            raise interrupts.pop()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        found.drop()
    assert not found.coming_up
    assert interrupts == []
