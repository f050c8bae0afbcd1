"""Reads the logs that reapers write: the newest lines for an error, new ones for a start-up."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from pytest_pdperf.stack.logwriter import LAST, MIDDLE, STAMP_LENGTH


def strip_stamp(line: str) -> str:
    """A log line as the process printed it."""
    return line[STAMP_LENGTH:] if line[:2] == "20" and line[10:11] == "T" else line


def segments(path: Path) -> tuple[Path, ...]:
    """The files of one log that exist, oldest lines first."""
    names = (path, path.with_name(path.name + MIDDLE), path.with_name(path.name + LAST))
    return tuple(p for p in names if p.exists())


def read_lines(path: Path) -> list[str]:
    """All lines of a log without stamps, oldest first; empty when there is no log."""
    out: list[str] = []
    for part in segments(path):
        text = part.read_text(encoding="utf-8", errors="replace")
        out += [strip_stamp(line) for line in text.splitlines()]
    return out


def tail(path: Path, lines: int = 40) -> str:
    """The newest lines of a log, stamps kept, without reading more than the last 256 KiB of each file."""
    newest: deque[str] = deque(maxlen=lines)
    for part in segments(path):
        with part.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 256 * 1024))
            newest.extend(file.read().decode("utf-8", "replace").splitlines())
    return "\n".join(newest)


class Follower:
    """Hands out the lines that were added since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path
        self._inode: int | None = None
        self._offset = 0
        self._rest = b""

    def new_lines(self, limit: int = 4 * 1024 * 1024) -> list[str]:
        """Complete new lines without stamps, at most `limit` bytes a call; a lost rotation is skipped."""
        last = self.path.with_name(self.path.name + LAST)
        data = self._read(limit)
        if not data and (self._file != last or self._replaced()) and last.exists():
            self._file, self._inode, self._offset, self._rest = last, None, 0, b""
            data = self._read(limit)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [strip_stamp(line.decode("utf-8", "replace")) for line in lines]

    def _replaced(self) -> bool:
        try:
            return self._file.stat().st_ino != self._inode
        except FileNotFoundError:
            return False

    def _read(self, limit: int) -> bytes:
        try:
            with self._file.open("rb") as file:
                inode = self._inode_of(file.fileno())
                if self._inode is not None and inode != self._inode:
                    return b""
                self._inode = inode
                file.seek(self._offset)
                data = file.read(limit)
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data

    @staticmethod
    def _inode_of(fd: int) -> int:
        return os.fstat(fd).st_ino
