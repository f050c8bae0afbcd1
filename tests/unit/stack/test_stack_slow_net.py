"""A network of one's own: made and left behind, or refused with the reason."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from pytest_pdperf.stack import slow_net
from pytest_pdperf.stack.slow_net import NoSlowNet, SlowNet, own_network


def namespace() -> str:
    return str(Path("/proc/thread-self/ns/net").readlink())


def test_without_iproute2_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoSlowNet, match="no program ip"), own_network():
        pass


def test_without_the_right_to_it_it_says_so_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def unshare(self, flags: int) -> int:
            return -1

    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("ctypes.CDLL", lambda name, use_errno: Refusing())
    before = namespace()
    with pytest.raises(NoSlowNet, match="no right to make a network namespace"), own_network():
        pass
    assert namespace() == before


@pytest.mark.parametrize(
    ("known", "expected"),
    [({"netem", "tbf"}, "netem delay 50ms rate 8000bit"), ({"tbf"}, "tbf rate 8000bit"), (set(), "")],
)
def test_the_kernels_best_discipline_is_taken(
    monkeypatch: pytest.MonkeyPatch, known: set[str], expected: str
) -> None:
    monkeypatch.setattr(slow_net, "_run", lambda *argv: "" if known & set(argv) else "qdisc kind is unknown")
    if expected:
        assert SlowNet().slow(bits_per_s=8000.0, delay_ms=50).startswith(expected)
    else:
        with pytest.raises(NoSlowNet, match="neither netem nor tbf"):
            SlowNet().slow(bits_per_s=8000.0, delay_ms=50)


def test_inside_is_a_loopback_that_nobody_else_has_and_outside_all_is_as_before() -> None:
    before = namespace()
    try:
        with own_network() as net:
            assert namespace() != before
            child = subprocess.run(
                ["readlink", "/proc/self/ns/net"], capture_output=True, text=True, check=True
            )
            assert child.stdout.strip() == namespace(), "what is started inside is inside"
            carried = net.carried()
            with (
                socket.create_server(("127.0.0.1", 0)) as server,
                socket.create_connection(server.getsockname()) as end,
            ):
                end.sendall(b"x" * 5000)
            assert net.carried() >= carried + 5000
            assert net.slow(bits_per_s=1e6, delay_ms=1)
            net.heal()
    except NoSlowNet as why:
        assert os.geteuid() != 0 or "CAP" in str(why) or "right" in str(why) or "no program" in str(why)
        pytest.skip(str(why))
    assert namespace() == before
