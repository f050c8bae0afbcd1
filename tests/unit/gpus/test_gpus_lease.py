"""Leases: one holder at a time, named to everybody else, and gone with its process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.gpus.grammar import Device, DeviceKind
from pytest_pdperf.gpus.lease import FOLDER_VARIABLE, Lease, acquire, lease_folder

ROOT = Path(__file__).parents[3]
A, B, C = (Device(str(i), DeviceKind.GPU, f"GPU-{name}", i) for i, name in enumerate("abc"))

HOLD = """
import sys, time
from pathlib import Path
from pytest_pdperf.gpus.grammar import Device, DeviceKind
from pytest_pdperf.gpus.lease import acquire
lease = acquire([Device("0", DeviceKind.GPU, "GPU-a", 0)], folder=Path(sys.argv[1]), command="holder --api-key=s3cret")
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts another process that holds GPU-a until its input ends."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.at_sleep: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self.at_sleep()


def test_a_second_holder_is_told_who_has_it(tmp_path: Path) -> None:
    with acquire([A, B], folder=tmp_path, command="pytest -m pd"):
        with pytest.raises(UsageProblem) as caught:
            acquire([B], folder=tmp_path)
        assert f"GPU 1 (GPU-b) is in use by process {os.getpid()} since " in str(caught.value)
        assert "pytest -m pd" in str(caught.value)
        acquire([C], folder=tmp_path).release()
    acquire([A, B], folder=tmp_path).release()


def test_all_or_none(tmp_path: Path) -> None:
    with acquire([B], folder=tmp_path):
        with pytest.raises(UsageProblem):
            acquire([C, A, B], folder=tmp_path)
        acquire([A, C], folder=tmp_path).release()


def test_another_process_holds_until_it_dies(
    tmp_path: Path, holder: Callable[[], subprocess.Popen[str]]
) -> None:
    process = holder()
    with pytest.raises(UsageProblem) as caught:
        acquire([A], folder=tmp_path)
    assert f"process {process.pid}" in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert "holder --api-key=***" in str(caught.value)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert str(process.pid) in (tmp_path / "GPU-a.lock").read_text(), "what the dead one wrote is still there"
    with acquire([A], folder=tmp_path) as lease:
        assert lease.held
        assert json.loads((tmp_path / "GPU-a.lock").read_text())["pid"] == os.getpid()


def test_a_child_of_the_holder_does_not_keep_the_lease(tmp_path: Path) -> None:
    lease = acquire([A], folder=tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        lease.release()
        acquire([A], folder=tmp_path).release()
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("content", ["", "{", "null", '{"pid": "x"}', '{"pid": 1}', "\x00" * 100, "[]"])
def test_stale_or_broken_content_never_blocks(tmp_path: Path, content: str) -> None:
    path = tmp_path / "GPU-a.lock"
    path.write_text(content)
    with acquire([A], folder=tmp_path, command="x"):
        path.write_text(content)
        with pytest.raises(UsageProblem, match="in use by a process that did not say who it is"):
            acquire([A], folder=tmp_path)


def test_release_twice_and_what_is_left(tmp_path: Path) -> None:
    lease = acquire([A], folder=tmp_path)
    assert lease.held
    lease.release()
    lease.release()
    assert not lease.held
    assert list(tmp_path.iterdir()) == []


def test_who_waited_for_a_removed_file_does_not_hold_the_device(tmp_path: Path) -> None:
    """Between the release and the waiter's next look a third run takes the GPU, under a new file of the same name."""
    clock, first = Clock(), acquire([A], folder=tmp_path)
    third: list[Lease] = []

    def change_hands() -> None:
        if len(clock.slept) == 1:
            first.release()
            third.append(acquire([A], folder=tmp_path, command="the third"))

    clock.at_sleep = change_hands
    with pytest.raises(UsageProblem, match=r"in use by process .*: the third"):
        acquire([A], 1.0, clock, sleep=clock.sleep, folder=tmp_path)
    assert clock.now == pytest.approx(101.0), "the deadline is the same whichever file it is"
    third[0].release()
    acquire([A], folder=tmp_path).release()


def test_a_file_that_cannot_be_removed_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's, in a sticky folder."""

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    acquire([A], folder=tmp_path).release()
    assert (tmp_path / "GPU-a.lock").read_text() == ""
    acquire([A], folder=tmp_path).release()


def test_waiting_ends_with_success_when_the_other_leaves(tmp_path: Path) -> None:
    clock, other = Clock(), acquire([A], folder=tmp_path, command="the nightly")
    clock.at_sleep = lambda: other.release() if len(clock.slept) == 3 else None
    told: list[str] = []
    with acquire([A], 10, clock, sleep=clock.sleep, folder=tmp_path, tell=told.append):
        assert len(clock.slept) == 3
    assert len(told) == 1, "once, not at every look"
    assert told[0].startswith(f"waiting: GPU 0 (GPU-a) is in use by process {os.getpid()} since ")
    assert told[0].endswith(": the nightly")


def test_waiting_ends_at_the_deadline_and_not_before(tmp_path: Path) -> None:
    clock = Clock()
    with acquire([A], folder=tmp_path):
        with pytest.raises(UsageProblem, match="in use by"):
            acquire([A], 1.1, clock, sleep=clock.sleep, folder=tmp_path)
        assert sum(clock.slept) == pytest.approx(1.1)
        clock.slept.clear()
        with pytest.raises(UsageProblem):
            acquire([A], 0, clock, sleep=clock.sleep, folder=tmp_path)
        assert clock.slept == [], "without waiting there is no sleep"


def test_an_interrupt_while_waiting_gives_back_what_was_taken(tmp_path: Path) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with acquire([B], folder=tmp_path):
        with pytest.raises(KeyboardInterrupt):
            acquire([A, B], 5, sleep=interrupt, folder=tmp_path)
        acquire([A], folder=tmp_path).release()


def test_devices_without_uuid_need_no_lock(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    with acquire([Device("cpu", DeviceKind.CPU)], folder=folder) as lease:
        assert lease.held
    assert not folder.exists()


def test_slices_are_leased_one_by_one(tmp_path: Path) -> None:
    first, second = (Device(f"MIG-{i}/1/0", DeviceKind.MIG, f"MIG-{i}/1/0", 0) for i in "ab")
    with acquire([first], folder=tmp_path), acquire([second], folder=tmp_path):
        assert sorted(p.name for p in tmp_path.iterdir()) == ["MIG-a_1_0.lock", "MIG-b_1_0.lock"]


def test_folder(tmp_path: Path) -> None:
    assert lease_folder({FOLDER_VARIABLE: str(tmp_path)}) == tmp_path
    default = lease_folder({})
    assert "pdperf" in default.name
    folder = tmp_path / "new" / "deep"
    acquire([A], folder=folder).release()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_shared_folder_serves_all_users(tmp_path: Path) -> None:
    shared, private = tmp_path / "shared", tmp_path / "private"
    shared.mkdir()
    shared.chmod(0o1777)
    before = os.umask(0o077)
    try:
        with acquire([A], folder=shared), acquire([A], folder=private):
            assert (shared / "GPU-a.lock").stat().st_mode & 0o777 == 0o666
            assert (private / "GPU-a.lock").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_another_user_is_kept_out_and_told() -> None:
    code = (
        "import fcntl, os, sys\n"
        "os.setuid(65534)\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "try:\n    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError:\n    print(os.pread(fd, 4096, 0).decode())\n"
    )
    with tempfile.TemporaryDirectory() as name:
        shared = Path(name)
        shared.chmod(0o1777)
        with acquire([A], folder=shared, command="mine"):
            argv = [sys.executable, "-c", code, str(shared / "GPU-a.lock")]
            found = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(found.stdout)["command"] == "mine"


def test_a_planted_folder_or_link_is_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    link = tmp_path / "link"
    link.symlink_to(real)
    with pytest.raises(UsageProblem, match=f"is not ours; set {FOLDER_VARIABLE}"):
        acquire([A], folder=link)
    (real / "GPU-a.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageProblem, match="cannot lease GPU 0"):
        acquire([A], folder=real)
    assert not (tmp_path / "elsewhere").exists()
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UsageProblem, match="cannot make the folder"):
        acquire([A], folder=blocked / "x")
