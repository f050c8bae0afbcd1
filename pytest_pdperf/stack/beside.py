"""A launch in a thread of its own, so that the next topology can come up while this one is measured."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial

from pytest_pdperf.errors import BringUpError
from pytest_pdperf.stack.launch import launch
from pytest_pdperf.stack.plan import LaunchPlan
from pytest_pdperf.stack.running import Stack

_LOOK_S = 0.2


class LaunchBeside:
    """One launch that somebody may later take over with `result`, or call off with `drop`; one of them has to be.

    The processes' reapers watch this whole process, not the thread, so they outlive the thread and end with pytest.
    """

    def __init__(self, plan: LaunchPlan, *, deadline_s: float, launch: Callable[..., Stack] = launch) -> None:
        self.plan = plan
        self.said: list[str] = []
        """Progress lines of the bring-up so far: a thread must not write into pytest's output."""
        self._called_off = threading.Event()
        self._stack: Stack | None = None
        self._error: BaseException | None = None
        # The environment is read now, in pytest's thread: pytest changes its own while its tests run.
        self._launch = partial(
            launch,
            plan,
            deadline_s=deadline_s,
            progress=self.said.append,
            called_off=self._called_off.is_set,
            base=dict(os.environ),
        )
        self._thread = threading.Thread(target=self._run, name=f"launch-{plan.topology.name}", daemon=True)

    def start(self) -> None:
        """Begin to bring the stack up."""
        self._thread.start()

    @property
    def coming_up(self) -> bool:
        """True until the stack is ready or its bring-up has failed."""
        return self._thread.is_alive()

    def result(self) -> Stack:
        """Wait for the end of the bring-up and hand the stack over. Raises what the bring-up raised (BringUpError)."""
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)
        if self._stack is None:
            raise self._error if self._error is not None else BringUpError("the bring-up never began")
        stack, self._stack = self._stack, None
        return stack

    def drop(self) -> tuple[str, ...]:
        """Call the launch off, or take down what has come up; returns what could not be killed.

        Returns when everything has ended. A Ctrl-C meanwhile is raised again after that.
        """
        self._called_off.set()
        interrupted: BaseException | None = None
        while self._thread.is_alive():
            try:
                self._thread.join(_LOOK_S)
            except BaseException as error:
                interrupted = error
        stack, self._stack = self._stack, None
        left = stack.close() if stack is not None else ()
        if interrupted is not None:
            raise interrupted
        return left

    def _run(self) -> None:
        try:
            self._stack = self._launch()
        except BaseException as error:
            self._error = error
