"""A slow network for one stack: a network namespace of its own, whose loopback is then slowed with tc."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CLONE_NEWNET = 0x40000000
MTU = 1500
"""As on a wire: packets of the loopback's usual 64 KiB would pass a slow rate in bursts."""
_HERE = Path("/proc/thread-self/ns/net")


class NoSlowNet(Exception):
    """Why this machine, or this user, cannot slow a network down; one line."""


class SlowNet:
    """The loopback of a namespace that nobody else uses."""

    def carried(self) -> int:
        """Bytes that the loopback has carried so far."""
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == "lo":
                return int(counts.split()[0])
        raise NoSlowNet("/proc/thread-self/net/dev has no loopback")

    def slow(self, *, bits_per_s: float, delay_ms: float) -> str:
        """Carry only so much, and everything `delay_ms` later; returns what was set.

        The delay needs netem. A kernel without it gets the rate alone (tbf), and the answer says so. Raises NoSlowNet.
        """
        rate = f"{bits_per_s:.0f}bit"
        netem = ("netem", "delay", f"{delay_ms:g}ms", "rate", rate, "limit", "100000")
        tbf = ("tbf", "rate", rate, "burst", str(2 * MTU), "limit", str(64 * 2**20))
        reasons = []
        for discipline in (netem, tbf):
            answer = _run("tc", "qdisc", "replace", "dev", "lo", "root", *discipline)
            if not answer:
                return " ".join(discipline)
            reasons.append(answer)
        raise NoSlowNet(f"tc knows neither netem nor tbf here: {'; '.join(reasons)}")

    def heal(self) -> None:
        """Full speed again."""
        _run("tc", "qdisc", "del", "dev", "lo", "root")


@contextmanager
def own_network() -> Iterator[SlowNet]:
    """Put the calling thread, and what it starts meanwhile, into a network namespace with nothing but a loopback.

    Processes and threads started inside must end inside. Raises NoSlowNet before anything is changed where `ip` or
    `tc` is missing or the right to do it (CAP_SYS_ADMIN) is.
    """
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise NoSlowNet(f"no program {program} (package iproute2)")
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        home = os.open(_HERE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as problem:
        raise NoSlowNet(f"no network namespaces on this kernel: {problem}") from None
    try:
        if libc.unshare(_CLONE_NEWNET) != 0:
            why = os.strerror(ctypes.get_errno())
            raise NoSlowNet(f"no right to make a network namespace ({why}); root has it")
        try:
            if said := _run("ip", "link", "set", "lo", "up", "mtu", str(MTU)):
                raise NoSlowNet(f"ip link set lo up: {said}")
            yield SlowNet()
        finally:
            if libc.setns(home, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "cannot go back to the network namespace before")
    finally:
        os.close(home)


def _run(*argv: str) -> str:
    """Empty when the command worked, else the last thing it said."""
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
        said = (done.stderr.strip() or done.stdout.strip() or f"exit {done.returncode}").splitlines()
        return "" if done.returncode == 0 else said[-1]
    return "did not end within 20 s"
