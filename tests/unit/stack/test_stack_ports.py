"""No two holders of one port, whoever asks, and a port in use is never handed out."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.stack.ports import (
    PortLease,
    PortRegistry,
    is_bindable,
    port_owner,
    port_state,
    port_window,
)


def registry(
    folder: Path,
    window: range = range(20000, 20016),
    busy: frozenset[int] = frozenset(),
    start: int = 20000,
) -> PortRegistry:
    return PortRegistry(folder, window=window, start=start, free=lambda port: port not in busy)


@pytest.mark.parametrize(
    ("ephemeral", "want"),
    [
        ("32768\t60999\n", range(24576, 32768)),
        ("1024 65535", range(1024, 1024)),
        ("1024 60999", range(61000, 65536)),
        ("10000 65535", range(1808, 10000)),
        ("nonsense", range(24576, 32768)),
    ],
)
def test_the_window_stays_clear_of_the_ephemeral_range(ephemeral: str, want: range) -> None:
    assert port_window(ephemeral) == want


def test_a_run_of_ports_is_contiguous_and_avoids_what_is_busy(tmp_path: Path) -> None:
    ports = registry(tmp_path, busy=frozenset({20003, 20008}))
    leases = [ports.reserve("side channel", 4) for _ in range(2)]
    taken = [port for lease in leases for port in range(lease.first, lease.first + 4)]
    assert len(set(taken)) == 8
    assert not {20003, 20008} & set(taken)
    assert ports.held() == tuple(sorted(taken))


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(1, 5), max_size=8),
    busy=st.frozensets(st.integers(20000, 20015), max_size=8),
    start=st.integers(20000, 20015),
)
def test_reservations_never_overlap_and_come_back_whole(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], busy: frozenset[int], start: int
) -> None:
    ports = registry(tmp_path_factory.mktemp("ports"), busy=busy, start=start)
    taken: list[int] = []
    for count in counts:
        try:
            lease = ports.reserve("x", count)
        except UsageProblem:
            free = set(range(20000, 20016)) - busy - set(taken)
            assert not any(set(range(p, p + count)) <= free for p in free), "there was room"
            continue
        taken += range(lease.first, lease.first + count)
    assert len(taken) == len(set(taken))
    assert not busy & set(taken)
    assert ports.held() == tuple(sorted(taken)), "a failed run keeps nothing"
    ports.close()
    assert list(ports.folder.iterdir()) == []


def test_two_planners_share_a_folder_without_meeting(tmp_path: Path) -> None:
    one, two = registry(tmp_path), registry(tmp_path)
    taken = [r.reserve("x", 2).first for r in (one, two, one, two, one, two, one, two)]
    assert len(set(taken)) == 8
    with pytest.raises(UsageProblem, match="no 2 neighbouring free ports for x in 20000-20015"):
        one.reserve("x", 2)


def test_planners_start_within_the_window_by_default(tmp_path: Path) -> None:
    first = PortRegistry(tmp_path, free=lambda port: True).reserve("x").first
    assert first in port_window()


def test_a_run_does_not_reach_beyond_the_window(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="no 17 neighbouring"):
        registry(tmp_path).reserve("x", 17)
    lease = registry(tmp_path).reserve("x", 16)
    assert (lease.first, str(lease)) == (20000, "x 20000-20015")


def test_another_process_is_kept_away_while_it_lives_and_forgotten_when_killed(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[3])
    code = (
        f"import sys, time; sys.path.insert(0, {root!r}); from pathlib import Path;"
        "from pytest_pdperf.stack.ports import PortRegistry;"
        "r = PortRegistry(Path(sys.argv[1]), window=range(20000, 20001), free=lambda p: True);"
        "r.reserve('t router http'); print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        mine = registry(tmp_path, window=range(20000, 20001))
        with pytest.raises(UsageProblem):
            mine.reserve("x")
        with pytest.raises(UsageProblem, match=rf"reserved by pid {holder.pid} for t router http"):
            mine.reserve_fixed("t router http", 20000)
        assert mine.sweep() == 0
        assert mine.held() == ()
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
    assert (tmp_path / "20000.lock").exists(), "a killed process cannot tidy up"
    assert mine.reserve("x").first == 20000
    mine.close()


def test_lock_files_of_the_dead_are_swept_and_others_stay(tmp_path: Path) -> None:
    files = {
        "20001.lock": ("pid 4194999 for x\n", 0.0),  # beyond the largest pid there is
        "20002.lock": (f"pid {os.getpid()} for x\n", 0.0),  # older than the process that has this pid now
        "20003.lock": ("", 0.0),
        "20004.lock": ("nonsense", 0.0),
        "20005.lock": (f"pid {os.getpid()} for x\n", None),  # alive, about to lock it
        "20006.lock": ("", None),  # just made
        "notes.txt": ("not ours", 0.0),
    }
    for name, (text, touched) in files.items():
        (tmp_path / name).write_text(text)
        if touched is not None:
            os.utime(tmp_path / name, (touched, touched))
    ports = registry(tmp_path)
    held = ports.reserve_fixed("x", 20007).first
    assert ports.sweep() == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "20005.lock",
        "20006.lock",
        f"{held}.lock",
        "notes.txt",
    ]


def test_a_file_that_is_locked_is_not_swept_whatever_it_says(tmp_path: Path) -> None:
    mine, other = registry(tmp_path), registry(tmp_path)
    held = mine.reserve("x").first
    path = tmp_path / f"{held}.lock"
    path.write_text("pid 4194999 for x\n")
    assert other.sweep() == 0
    assert path.exists()
    mine.close()
    assert not path.exists()


def test_releasing_what_is_not_held_is_nothing(tmp_path: Path) -> None:
    ports = registry(tmp_path)
    ports.release(PortLease("x", 20000, 3))
    assert ports.held() == ()


def test_locks_are_not_handed_to_children(tmp_path: Path) -> None:
    ports = registry(tmp_path)
    ports.reserve("x")
    assert all(not os.get_inheritable(fd) for fd in ports._locks.values())


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_listener_on_any_address_is_seen(host: str) -> None:
    with socket.socket() as sock:
        sock.bind((host, 0))
        sock.listen()
        port = sock.getsockname()[1]
        assert not is_bindable(port)
        assert port_state(port) == "busy"
        assert f"pid {os.getpid()}" in port_owner(port)
    assert is_bindable(port)
    assert port_state(port) == "free"


def test_a_loading_engine_that_is_bound_but_not_listening_is_seen() -> None:
    """vLLM binds before it loads the model and listens minutes later; SO_REUSEADDR alone would share the port."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        assert not is_bindable(port)
        assert port_state(port) == "busy"


def test_time_wait_does_not_block_a_fixed_port(tmp_path: Path) -> None:
    """The last run's router closed its connections a moment ago."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the active close: its end stays in TIME_WAIT
        assert client.recv(1) == b""
        client.close()
    assert port_state(port) == "time_wait"
    ports = PortRegistry(tmp_path, window=range(20000, 20001))
    assert ports.reserve_fixed("router", port).first == port
    ports.close()


def test_a_busy_fixed_port_is_not_kept(tmp_path: Path) -> None:
    ports = PortRegistry(tmp_path, window=range(20000, 20001))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        with pytest.raises(UsageProblem, match="in use by pid"):
            ports.reserve_fixed("router", sock.getsockname()[1])
    assert ports.held() == ()
