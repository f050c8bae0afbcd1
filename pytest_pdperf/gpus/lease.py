"""Two runs on one GPU measure each other, so a run holds a lock for each of its GPUs.

The lock is `flock` on a file named after the UUID: the kernel drops it when the process ends, however it
ends, and what is written in the file only tells others who holds it. Children that are started with `exec` do
not inherit it. A file is removed while it is locked; who waited for it then holds a file that is no longer there,
notices, and goes for the one that is.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from pytest_pdperf.errors import UsageProblem

from .grammar import Device

FOLDER_VARIABLE = "PDPERF_LEASE_DIR"
POLL_S = 0.2
_SECRET = re.compile(r"(?i)((?:key|token|secret|password)[^\s=]*[=\s]+)\S+")


@dataclass(slots=True)
class Lease:
    """Locks on some devices, held until `release`, the end of the `with` block, or of this process."""

    devices: tuple[Device, ...]
    _files: dict[Path, int] = field(default_factory=dict, repr=False)
    """Lock file -> its open descriptor."""

    @property
    def held(self) -> bool:
        """False after `release`."""
        return bool(self._files) or not any(device.uuid for device in self.devices)

    def release(self) -> None:
        """Give all devices back; does nothing the second time."""
        while self._files:
            path, descriptor = self._files.popitem()
            try:
                # Another user's file in a shared folder cannot be removed; it says nothing then, and is used again.
                with suppress(OSError):
                    os.ftruncate(descriptor, 0)
                with suppress(OSError):
                    path.unlink()
            finally:
                os.close(descriptor)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def lease_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Folder of the lock files: PDPERF_LEASE_DIR (one for all users of a node), else one of this user."""
    environ = os.environ if environ is None else environ
    if environ.get(FOLDER_VARIABLE):
        return Path(environ[FOLDER_VARIABLE])
    runtime = Path(f"/run/user/{os.getuid()}")
    if runtime.is_dir() and os.access(runtime, os.W_OK):
        return runtime / "pdperf"
    return Path(tempfile.gettempdir()) / f"pdperf-{os.getuid()}"


def acquire(
    devices: Sequence[Device],
    wait_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    *,
    sleep: Callable[[float], None] = time.sleep,
    folder: Path | None = None,
    command: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Lease:
    """Lock every device that has a UUID; all of them or none.

    Waits up to `wait_s` seconds for others, and calls `tell` with who each of them is. Raises UsageProblem that names
    the device and who holds it.
    """
    place = folder or lease_folder()
    lease = Lease(tuple(devices))
    deadline = clock() + wait_s
    holder = json.dumps({"pid": os.getpid(), "command": _command(command), "since": time.strftime("%F %T")})
    # One order for all runs: two of them can then never wait for each other.
    wanted = sorted((device for device in devices if device.uuid), key=lambda device: device.uuid)
    if wanted:
        _prepare(place)
    try:
        for device in wanted:
            path = place / (re.sub(r"[^A-Za-z0-9-]", "_", device.uuid) + ".lock")
            lease._files[path] = _lock(device, path, holder, deadline, clock, sleep, tell)
    except BaseException:
        lease.release()
        raise
    return lease


def _lock(
    device: Device,
    path: Path,
    holder: str,
    deadline: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    tell: Callable[[str], None],
) -> int:
    while True:
        try:
            descriptor = _open(path)
        except OSError as error:
            raise UsageProblem(f"cannot lease {device}: {path}: {error.strerror}") from None
        try:
            _wait_for(device, descriptor, deadline, clock, sleep, tell)
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, holder.encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _wait_for(
    device: Device,
    descriptor: int,
    deadline: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    tell: Callable[[str], None],
) -> None:
    told = ""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            left = deadline - clock()
            in_use = f"{device} ({device.uuid}) is in use by {_holder(descriptor)}"
            if left <= 0:
                raise UsageProblem(f"{in_use}; wait for it or name other GPUs") from None
            if in_use != told:
                told = in_use
                tell(f"waiting: {in_use}")
            sleep(min(POLL_S, left))


def _is_at(descriptor: int, path: Path) -> bool:
    """False when the file was removed, or another put in its place, since it was opened."""
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _open(path: Path) -> int:
    """The lock file, made when it is missing; in a folder shared by several users all of them may open it."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)  # without O_CREAT: Linux refuses that on others' files in a sticky folder
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o600)
    status = os.fstat(descriptor)
    if path.parent.stat().st_mode & 0o022 and status.st_uid == os.getuid():
        os.fchmod(descriptor, 0o666)
    return descriptor


def _holder(descriptor: int) -> str:
    try:
        data = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {int(data['pid'])} since {data['since']}: {data['command']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that did not say who it is"


def _command(given: str | None) -> str:
    text = " ".join(sys.argv) if given is None else given
    return _SECRET.sub(r"\1***", text)[:200]


def _prepare(folder: Path) -> None:
    """Create the folder for this user alone; refuse one that somebody else could have put there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise UsageProblem(f"cannot make the folder for GPU leases, {folder}: {error.strerror}") from None
    own = status.st_uid in (os.getuid(), 0)
    if not stat.S_ISDIR(status.st_mode) or not own:
        raise UsageProblem(
            f"the folder for GPU leases, {folder}, is not ours; set {FOLDER_VARIABLE} to another"
        )
