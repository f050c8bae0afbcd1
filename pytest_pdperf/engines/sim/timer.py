"""A timer that is on time: the event loop's own has a grid of one millisecond, a fifth of a fast decode step."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable
from typing import Protocol

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1
_RANG = -1.0


class Timer(Protocol):
    """One alarm that can be moved: `callback` runs soon after the moment set last, and now and then for nothing."""

    def set(self, when: float | None) -> None:
        """Move the alarm to `when` on time.monotonic(), or take it away."""

    def close(self) -> None:
        """Give up the alarm for good."""


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class KernelTimer:
    """An alarm on a Linux timerfd: microsecond resolution without spinning. OSError where there is none."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._libc, "timerfd_create"):
            raise OSError("this C library has no timerfd")
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._spec = _Itimerspec()
        self._pointer = ctypes.byref(self._spec)
        self._callback = callback
        self._loop = loop
        self._when: float | None = None
        loop.add_reader(self._fd, self._ring)

    def set(self, when: float | None) -> None:
        """Move the alarm; a moment in the past rings at once."""
        if when != self._when:
            self._when = when
            self._write(when)

    def _write(self, when: float | None) -> None:
        value = self._spec.it_value
        if when is None:
            value.tv_sec = value.tv_nsec = 0
        else:
            nanoseconds = max(1, int(when * 1e9))
            value.tv_sec, value.tv_nsec = divmod(nanoseconds, 1_000_000_000)
        self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, self._pointer, None)

    def close(self) -> None:
        """Stop and free the descriptor."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ring(self) -> None:
        # Setting a timerfd anew also clears its expiry, which saves reading it.
        self._when = _RANG
        self._callback()
        if self._when == _RANG:
            self._when = None
            self._write(None)


class LoopTimer:
    """The same alarm on the event loop's own timers, where there is no timerfd."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def set(self, when: float | None) -> None:
        """Move the alarm; a moment in the past rings in the loop's next round."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if when is not None:
            self._handle = self._loop.call_later(max(0.0, when - time.monotonic()), self._callback)

    def close(self) -> None:
        """Take the alarm away."""
        self.set(None)


def make_timer(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> Timer:
    """The best alarm this platform has."""
    try:
        return KernelTimer(loop, callback)
    except OSError:
        return LoopTimer(loop, callback)
