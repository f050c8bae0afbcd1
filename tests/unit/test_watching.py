"""A death is the cause of failed requests, however fast they fail."""

from itertools import count
from typing import cast

import pytest

from pytest_pdperf.errors import RoleDied
from pytest_pdperf.measure.records import CellRecords, RequestRecord, Status
from pytest_pdperf.stack.launch import Stack
from pytest_pdperf.watching import blame_a_death


class Dying:
    """Ends just before its third look."""

    def __init__(self, lives: int) -> None:
        self.lives = lives
        self.looks = 0

    def check(self) -> None:
        self.looks += 1
        if self.looks > self.lives:
            raise RoleDied("decode-0", "killed by SIGKILL")


def records(status: Status) -> CellRecords:
    one = RequestRecord("main", 0, False, status, 8, 8, 0)
    return CellRecords((one,), "kernel", 0, 1)


def test_failed_requests_are_explained_by_a_death_that_is_seen_late() -> None:
    with pytest.raises(RoleDied, match="decode-0"):
        blame_a_death(cast(Stack, Dying(2)), records(Status.HTTP_ERROR), clock=lambda: 0.0)


def test_good_requests_wait_for_nobody() -> None:
    stack = Dying(1)
    blame_a_death(cast(Stack, stack), records(Status.OK), clock=lambda: 0.0)
    assert stack.looks == 1


def test_the_wait_ends() -> None:
    ticks = count(0.0, 0.4)
    stack = Dying(99)
    blame_a_death(cast(Stack, stack), records(Status.TRUNCATED), clock=lambda: next(ticks))
    assert 2 <= stack.looks <= 4
