"""A disk that is full, and one that has room again: what a run writes is neither lost nor half there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_pdperf.errors import CannotKeep
from pytest_pdperf.run_files import CELLS, RunFiles


class Disk:
    """Refuses every write once it is full, as a kernel does: with no file name in the error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        write: Callable[[Path, bytes], int] = Path.write_bytes
        fallocate = os.posix_fallocate

        def write_bytes(path: Path, page: bytes) -> int:
            if self.full:
                path.touch()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(path, page)

        def posix_fallocate(fd: int, offset: int, length: int) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fallocate(fd, offset, length)

        monkeypatch.setattr(Path, "write_bytes", write_bytes)
        monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path, "20260101-000000-abcd")


def test_what_a_full_disk_refuses_is_written_once_there_is_room(files: RunFiles, disk: Disk) -> None:
    first, second = files.folder / CELLS / "a.json", files.folder / CELLS / "b.json"
    files.put(first, b"old")
    disk.full = True
    files.put(first, b"new")
    files.put(second, b"1")
    assert first.read_bytes() == b"old"
    assert [path.name for path in first.parent.iterdir()] == ["a.json"], (
        "neither half a file nor a part of one"
    )
    assert files.waiting == {first: b"new", second: b"1"}
    disk.full = False
    assert files.trouble() == ""
    assert (first.read_bytes(), second.read_bytes(), files.waiting) == (b"new", b"1", {})


def test_a_full_disk_is_named_with_what_is_kept_and_the_way_out(files: RunFiles, disk: Disk) -> None:
    files.put(files.folder / CELLS / "a.json", b"1")
    disk.full = True
    files.put(files.folder / CELLS / "b.json", b"2")
    files.put(files.folder / "environment" / "one.json", b"3")
    assert files.trouble().splitlines() == [
        f"cannot write {files.folder / CELLS / 'b.json'}: No space left on device",
        f"kept: 1 measured cells in {files.folder / CELLS}",
        "in memory, and written by this run once there is room: b.json, one.json",
        "way out: make room there, then run again with --resume 20260101-000000-abcd, which leaves out the cells that "
        "are kept",
    ]
    assert "not kept: b.json, one.json" in files.trouble(ended=True)
    with pytest.raises(CannotKeep, match=r"one c4: cannot write .*b\.json"):
        files.make_room("one c4", 1)


def test_there_is_room_for_what_comes_or_it_does_not_begin(files: RunFiles, disk: Disk) -> None:
    files.make_room("one c4", 4096)
    assert list(files.folder.iterdir()) == []
    disk.full = True
    with pytest.raises(CannotKeep) as refused:
        files.make_room("one c4", 4096)
    assert str(refused.value).splitlines() == [
        f"one c4: no room for 4 KiB in {files.folder}: No space left on device",
        f"kept: 0 measured cells in {files.folder / CELLS}",
        "way out: make room there, then run again",
    ]


def test_another_process_of_the_run_takes_over_what_waits(
    files: RunFiles, disk: Disk, tmp_path: Path
) -> None:
    worker = RunFiles(tmp_path, "20260101-000000-abcd")
    disk.full = True
    worker.put(tmp_path / CELLS / "a.json", b"1")
    files.adopt(dict(worker.waiting))
    assert files.trouble()
    disk.full = False
    files.adopt({})
    assert (tmp_path / CELLS / "a.json").read_bytes() == b"1"
