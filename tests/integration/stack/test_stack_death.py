"""However the process that owns a stack ends, its engines and its router end too."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_pdperf.stack import procfs
from pytest_pdperf.stack.ports import PortRegistry

_SCRIPT = Path(__file__).with_name("owner_script.py")
_PATIENCE_S = 40.0
pytestmark = pytest.mark.skipif(
    not (Path(sys.executable).parent / "vllm-router").exists(), reason="needs vllm-router (extra `routers`)"
)


class Owner:
    """A process that owns a stack."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.run_id = f"death-{folder.name}"
        self.ports = folder / "ports"
        self.process = subprocess.Popen(
            [sys.executable, str(_SCRIPT), str(folder), self.run_id, mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.output = b""

    def says(self, text: str) -> None:
        assert self.process.stdout is not None
        limit = time.monotonic() + _PATIENCE_S
        while text.encode() not in self.output:
            assert time.monotonic() < limit, self.output.decode()
            if select.select([self.process.stdout], [], [], 0.5)[0]:
                data = self.process.stdout.read1(65536)  # type: ignore[attr-defined]
                assert data, f"ended early: {self.output.decode()}"
                self.output += data

    def everything(self) -> list[procfs.Proc]:
        """The owner's children and all below, whether or not they carry the marker."""
        return [s.proc for s in procfs.descendants(self.process.pid) if s.state not in "ZX"]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Callable[[str], Owner]]:
    owners: list[Owner] = []

    def go(mode: str) -> Owner:
        owners.append(Owner(tmp_path, mode))
        return owners[-1]

    yield go
    for owner in owners:
        owner.process.kill()
        owner.process.wait()
        assert owner.process.stdout is not None
        owner.process.stdout.close()
        _all_gone(owner, [])


def _all_gone(owner: Owner, known: list[procfs.Proc]) -> float:
    began = time.monotonic()
    while True:
        left = [s.proc for s in procfs.marked(owner.run_id)] + [p for p in known if procfs.is_alive(p)]
        waited = time.monotonic() - began
        if not left:
            return waited
        assert waited < _PATIENCE_S, f"still there: {left}"
        time.sleep(0.05)


@pytest.mark.parametrize("mode", ["serve", "starting"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_killed_owner_leaves_no_process(
    own: Callable[[str], Owner], mode: str, signum: signal.Signals
) -> None:
    owner = own(mode)
    owner.says("up\n" if mode == "serve" else "decode-0: healthy")
    known = owner.everything()
    # 2 reapers, 2 engines, prefill's hidden orphan; the router and its reaper only when it serves
    assert len(known) >= (7 if mode == "serve" else 5)
    owner.process.send_signal(signum)
    assert owner.process.wait(_PATIENCE_S) == -signum
    _all_gone(owner, known)


def test_locks_of_a_killed_owner_can_be_taken_again(own: Callable[[str], Owner]) -> None:
    owner = own("serve")
    owner.says("up\n")
    locks = sorted(int(p.stem) for p in owner.ports.glob("*.lock"))
    assert len(locks) > 5
    registry = PortRegistry(owner.ports, window=range(locks[0], locks[0] + 1), free=lambda port: True)
    assert registry.sweep() == 0, "held by a living process"
    owner.process.kill()
    owner.process.wait()
    _all_gone(owner, [])
    assert registry.reserve("again").first == locks[0]
    assert registry.sweep() == len(locks) - 1
    registry.close()
    assert list(owner.ports.iterdir()) == []


def test_ctrl_c_closes_the_stack(own: Callable[[str], Owner]) -> None:
    owner = own("serve")
    owner.says("up\n")
    known = owner.everything()
    owner.process.send_signal(signal.SIGINT)
    owner.says("closed\n")
    assert not [p for p in known if procfs.is_alive(p)], "all gone before close returned"
    assert owner.process.wait(_PATIENCE_S) == -signal.SIGINT


def test_a_second_ctrl_c_cuts_the_grace_and_still_leaves_nothing(own: Callable[[str], Owner]) -> None:
    owner = own("patient")
    owner.says("up\n")
    known = owner.everything()
    owner.process.send_signal(signal.SIGINT)
    owner.says("closing\n")
    time.sleep(0.5)
    assert owner.process.poll() is None, "the engines ignore SIGTERM and the grace is long"
    owner.process.send_signal(signal.SIGINT)
    assert owner.process.wait(_PATIENCE_S) == -signal.SIGINT
    assert not [p for p in known if procfs.is_alive(p)], "all gone before the interrupt went on"


def test_a_forked_copy_of_the_owner_does_not_keep_the_stack_alive(own: Callable[[str], Owner]) -> None:
    """The copy holds the pipes to the reapers open; they watch the owner itself."""
    owner = own("forked")
    owner.says("up\n")
    children = [s for s in procfs.descendants(owner.process.pid) if s.ppid == owner.process.pid]
    copies = [s.proc for s in children if s.sid != s.proc.pid]
    assert len(copies) == 1, "reapers lead sessions of their own, a copy does not"
    known = [p for p in owner.everything() if p not in copies]
    try:
        owner.process.kill()
        owner.process.wait()
        _all_gone(owner, known)
        assert procfs.is_alive(copies[0])
    finally:
        procfs.send(copies[0], signal.SIGKILL)


def test_the_end_of_the_starting_thread_is_not_the_end_of_the_engines(own: Callable[[str], Owner]) -> None:
    owner = own("thread")
    owner.says("up\n")
    owner.process.kill()
    owner.process.wait()
    _all_gone(owner, [])
