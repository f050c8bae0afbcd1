"""Hands out ports so that engines of one machine never meet: one planner, locks that die with their owner.

Asking the OS for a free port and starting a server on it later races with everybody who does the same. Here
a port is a locked file below a directory of this user, and it lies below the ephemeral range, where no
outgoing connection of the machine can take it in between.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path

import psutil

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.stack.secrets import mask

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_UNWRITTEN_S = 60.0
"""A process that has just made a lock file writes into it within this time."""
_WANTED = 8192
"""Ports in the window, if that many fit."""


def runtime_dir() -> Path:
    """This user's directory for locks: $XDG_RUNTIME_DIR/pdperf, else one in the temporary directory, mode
    0700.

    Raises UsageProblem when the directory belongs to somebody else.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    usable = base is not None and os.access(base, os.W_OK)
    path = Path(base) / "pdperf" if base and usable else Path(tempfile.gettempdir()) / f"pdperf-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise UsageProblem(f"{path} belongs to another user; set XDG_RUNTIME_DIR to a directory of your own")
    return path


def port_window(ephemeral: str | None = None) -> range:
    """Ports to choose from: below the ephemeral range, above it when there is too little room below."""
    try:
        text = _EPHEMERAL.read_text() if ephemeral is None else ephemeral
        low, high = (int(part) for part in text.split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    below = range(max(1024, low - _WANTED), low)
    above = range(high + 1, min(65536, high + 1 + _WANTED))
    return below if len(below) >= min(len(above), 1024) else above


def is_bindable(port: int, *, host: str = "0.0.0.0") -> bool:
    """True when nobody holds the port on any address, not even bound without listening or in TIME_WAIT."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((host, port))
        except OSError:
            return False
    return True


def port_state(port: int) -> str:
    """`free`, `time_wait` (usable by a server that sets SO_REUSEADDR, as all of ours do) or `busy`."""
    if is_bindable(port):
        return "free"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("0.0.0.0", port))
        except OSError:
            return "busy"
    # Bindable with REUSEADDR: TIME_WAIT, or a socket that is bound and does not listen yet (a loading
    # engine).
    states = {status for _, status in _connections(port)}
    return "time_wait" if states == {psutil.CONN_TIME_WAIT} else "busy"


def port_owner(port: int, *, besides: Container[int] = ()) -> str:
    """Who holds a port, for an error: pid and command, as far as this user may see; pids in `besides` do not count."""
    for pid, _ in _connections(port):
        if pid and pid not in besides:
            try:
                process = psutil.Process(pid)
                command = " ".join(" ".join(process.cmdline()).split()) or process.name()
            except psutil.Error:
                command = "command unknown"
            return f"pid {pid} ({mask(command)[:120]})"
    return "a process that this user may not see"


def _connections(port: int) -> list[tuple[int | None, str]]:
    """(pid, status) of every TCP socket with this local port."""
    try:
        found = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return []
    return [(c.pid, c.status) for c in found if c.laddr and c.laddr.port == port]


def _is_stale(path: Path) -> bool:
    """Whether the process that wrote a lock file is gone, or nobody has written into it for a minute."""
    try:
        words = path.read_text().split()
        written = path.stat().st_mtime
    except OSError:
        return False
    if len(words) < 2 or words[0] != "pid" or not words[1].isdigit():
        return time.time() - written > _UNWRITTEN_S
    try:
        return (
            psutil.Process(int(words[1])).create_time() > written + 1.0
        )  # its pid belongs to another by now
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


@dataclass(frozen=True, slots=True)
class PortLease:
    """A contiguous run of reserved ports."""

    label: str
    first: int
    count: int

    def __str__(self) -> str:
        last = f"-{self.first + self.count - 1}" if self.count > 1 else ""
        return f"{self.label} {self.first}{last}"


class PortRegistry:
    """Reservations of this process. A reservation ends with `release`, `close`, or the death of the process.

    `folder` holds one locked file a port; `window` are the ports to choose from and `start` the first to try; `free`
    tells whether a port can be bound. Processes that share the folder never get the same port.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        window: range | None = None,
        start: int | None = None,
        free: Callable[[int], bool] = is_bindable,
    ) -> None:
        self.folder = folder if folder is not None else runtime_dir() / "ports"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.window = port_window() if window is None else window
        self._free = free
        self._locks: dict[int, int] = {}
        # Users have folders of their own, so let them start at different places.
        offset = (os.getuid() * 997 + os.getpid() * 31) % max(1, len(self.window))
        self._next = self.window.start + offset if start is None else start

    def reserve(self, label: str, count: int = 1) -> PortLease:
        """Reserve `count` neighbouring ports that nobody holds now.

        Raises UsageProblem when the window has no such run.
        """
        size = len(self.window)
        tried = 0
        while tried < size:
            first = self._next
            if first + count > self.window.stop:
                tried += self.window.stop - first
                self._next = self.window.start
                continue
            bad = self._take(range(first, first + count), label)
            if bad is None:
                self._next = first + count
                return PortLease(label, first, count)
            tried += bad + 1 - first
            self._next = bad + 1
        raise UsageProblem(
            f"no {count} neighbouring free ports for {label} in {self.window.start}-{self.window.stop - 1}; "
            f"'pdperf doctor' shows what is left of dead runs"
        )

    def reserve_fixed(self, label: str, port: int) -> PortLease:
        """Reserve a port that the user asked for. Raises UsageProblem naming the owner when it is taken."""
        bad = self._take(range(port, port + 1), label, check=False)
        if bad is not None:
            raise UsageProblem(
                f"{label}: port {port} is reserved by {self.holder(port)}; choose another or leave it out"
            )
        if port_state(port) == "busy":
            self.release(PortLease(label, port, 1))
            raise UsageProblem(
                f"{label}: port {port} is in use by {port_owner(port)}; choose another or leave it out"
            )
        return PortLease(label, port, 1)

    def release(self, lease: PortLease) -> None:
        """Give ports back; those not held are ignored."""
        for port in range(lease.first, lease.first + lease.count):
            fd = self._locks.pop(port, None)
            if fd is not None:
                # Unlink while locked: whoever opened the file meanwhile finds it unlinked and tries again.
                self._path(port).unlink(missing_ok=True)
                os.close(fd)

    def close(self) -> None:
        """Give everything back."""
        for port in list(self._locks):
            self.release(PortLease("", port, 1))

    def sweep(self) -> int:
        """Remove lock files of processes that are gone, such as killed runs; the number removed.

        They do no harm (a dead process holds no lock) and are reused; this is for tidiness. The pid in a file only says
        whether to look, so that nobody else's file is locked for a moment; the lock decides.
        """
        removed = 0
        for path in self.folder.glob("*.lock"):
            port = int(path.stem) if path.stem.isdigit() else None
            if port is None or port in self._locks or not _is_stale(path):
                continue
            if self._lock(port, "sweep"):
                self.release(PortLease("sweep", port, 1))
                removed += 1
        return removed

    def held(self) -> tuple[int, ...]:
        """Ports that this registry holds."""
        return tuple(sorted(self._locks))

    def holder(self, port: int) -> str:
        """What the holder of a port's lock wrote into it."""
        try:
            return self._path(port).read_text().strip() or "another run"
        except OSError:
            return "another run"

    def _path(self, port: int) -> Path:
        return self.folder / f"{port}.lock"

    def _take(self, ports: range, label: str, *, check: bool = True) -> int | None:
        """Lock all ports; None, or the last port that is in the way (and then nothing stays locked)."""
        taken: list[int] = []
        for port in ports:
            if port in self._locks or not self._lock(port, label):
                break
            taken.append(port)
            if check and not self._free(port):
                break
        else:
            return None
        for port_taken in taken:
            self.release(PortLease(label, port_taken, 1))
        return port

    def _lock(self, port: int, label: str) -> bool:
        path = self._path(port)
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                return False
            try:
                same = path.stat().st_ino == os.fstat(fd).st_ino
            except FileNotFoundError:
                same = False
            if same:
                break
            os.close(fd)
        os.ftruncate(fd, 0)
        os.write(fd, f"pid {os.getpid()} for {label}\n".encode())
        self._locks[port] = fd
        return True
