"""Logs are bounded, stamped and readable: nothing of the start or of the end gets lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.stack.logs import Follower, read_lines, strip_stamp, tail
from pytest_pdperf.stack.logwriter import CUT, MAX_LINE, STAMP_LENGTH, LogWriter, stamp


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.25

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.log"


def test_a_stamp_has_milliseconds_and_a_fixed_width() -> None:
    assert stamp(1_800_000_000.25)[-5:] == ".250 "
    assert len(stamp(0.0)) == STAMP_LENGTH
    assert strip_stamp(stamp(1_800_000_000.0) + "2 words") == "2 words"
    assert strip_stamp("2026 was a good year") == "2026 was a good year"


def test_every_line_is_stamped_and_comes_back_without(path: Path) -> None:
    log = LogWriter(str(path), 10_000, clock=Clock())
    log.feed(b"one\ntwo\n\nthr")
    log.feed(b"ee\r\nfour")
    log.close()
    assert read_lines(path) == ["one", "two", "three", "four"]
    assert all(line.startswith(stamp(1_800_000_000.25)) for line in path.read_text().splitlines())


@given(chunks=st.lists(st.binary(max_size=40), max_size=20))
def test_how_the_output_is_cut_into_reads_does_not_matter(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("log")
    whole, parts = LogWriter(str(folder / "a"), 10**6), LogWriter(str(folder / "b"), 10**6)
    whole.feed(b"".join(chunks))
    for chunk in chunks:
        parts.feed(chunk)
    whole.close()
    parts.close()
    assert read_lines(folder / "a") == read_lines(folder / "b")


def test_progress_bars_and_colours_become_plain_lines(path: Path) -> None:
    log = LogWriter(str(path), 10_000)
    log.feed(b"loading 10%\rloading 90%\r\x1b[32mdone\x1b[0m\n")
    log.close()
    assert read_lines(path) == ["loading 10%", "loading 90%", "done"]


def test_a_line_without_an_end_shows_after_a_second(path: Path) -> None:
    clock = Clock()
    log = LogWriter(str(path), 10_000, clock=clock)
    log.feed(b"password? ")
    log.flush_partial()
    assert read_lines(path) == []
    clock.now += 1.5
    log.flush_partial()
    assert read_lines(path) == ["password? "]


def test_an_endless_line_is_cut_and_does_not_grow_in_memory(path: Path) -> None:
    log = LogWriter(str(path), 10**6)
    for _ in range(10):
        log.feed(b"x" * 8000)
    log.feed(b"\nnext\n")
    log.close()
    lines = read_lines(path)
    assert lines[-1] == "next"
    assert max(map(len, lines)) < MAX_LINE + 100
    assert "bytes cut" in lines[0]


def test_the_cap_keeps_the_start_and_the_end(path: Path, tmp_path: Path) -> None:
    cap = 20_000
    log = LogWriter(str(path), cap)
    for i in range(5000):
        log.feed(f"line {i}\n".encode())
    log.close()
    lines = read_lines(path)
    assert lines[:3] == ["line 0", "line 1", "line 2"]
    assert lines[-1] == "line 4999"
    assert CUT in lines
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= cap + len(CUT) + STAMP_LENGTH + 1
    after = lines[lines.index(CUT) + 1 :]
    numbers = [int(line.split()[1]) for line in after]
    assert numbers == list(range(numbers[0], 5000)), "no hole in the tail"
    assert tail(path, 2).splitlines()[-1].endswith("line 4999")


def test_a_full_disk_drops_lines_and_says_so() -> None:
    log = LogWriter("/dev/full", 10**6)
    log.feed(b"one\ntwo\n")
    assert log.dropped == 2
    log.close()


def test_secrets_are_masked(path: Path) -> None:
    log = LogWriter(str(path), 10_000, ("geheim99",))
    log.feed(b"it is gehe")
    log.feed(b"im99!\n")
    log.close()
    assert read_lines(path) == ["it is ***!"]


def test_a_follower_hands_out_each_line_once(path: Path) -> None:
    follower = Follower(path)
    assert follower.new_lines() == []
    log = LogWriter(str(path), 10_000)
    log.feed(b"one\ntwo\n")
    assert follower.new_lines() == ["one", "two"]
    assert follower.new_lines() == []
    log.feed(b"three\n")
    assert follower.new_lines() == ["three"]
    log.close()


def test_a_follower_goes_on_after_the_log_was_cut(path: Path) -> None:
    log = LogWriter(str(path), 4096)
    follower = Follower(path)
    got: list[str] = []
    for i in range(600):
        log.feed(f"line {i}\n".encode())
        for _ in range(3):
            got += follower.new_lines()
    log.close()
    numbers = [int(line.split()[1]) for line in got if line.startswith("line")]
    assert numbers == list(range(600))


def test_a_follower_that_missed_a_rotation_still_gets_the_newest(path: Path) -> None:
    log = LogWriter(str(path), 4096)
    log.feed(b"first\n")
    follower = Follower(path)
    assert follower.new_lines() == ["first"]
    for i in range(3000):
        log.feed(f"line {i}\n".encode())
    log.close()
    got = [line for _ in range(5) for line in follower.new_lines()]
    assert got[-1] == "line 2999"
    assert len(got) == len(set(got))


def test_no_log_is_no_lines(path: Path) -> None:
    assert read_lines(path) == []
    assert tail(path) == ""
