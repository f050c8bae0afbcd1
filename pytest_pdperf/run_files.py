"""The run's folder, so that a full disk costs neither a measurement nor the hours before it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .errors import CannotKeep
from .writing import try_room, whole

CELLS = "cells"
"""Folder of a run with one file for each test item that measured a cell."""


class RunFiles:
    """Writes small files whole. What the disk refuses waits in memory and is tried again with the next one."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.folder = folder
        self._run_id = run_id
        self._waiting: dict[Path, bytes] = {}
        self._refusal: OSError | None = None

    @property
    def waiting(self) -> Mapping[Path, bytes]:
        """Files that are in memory only."""
        return self._waiting

    def put(self, path: Path, page: bytes) -> None:
        """Write a file, with its folder, now or as soon as the disk takes it."""
        self._waiting[path] = page
        self._write()

    def adopt(self, waiting: Mapping[Path, bytes]) -> None:
        """Take over what another process of this run could not write."""
        self._waiting |= waiting
        self._write()

    def make_room(self, what: str, size: int) -> None:
        """Raise CannotKeep unless everything is written and the disk takes `size` bytes more, for `what`."""
        if trouble := self.trouble():
            raise CannotKeep(f"{what}: {trouble}")
        try:
            try_room(self.folder, size)
        except OSError as refusal:
            need = f"no room for {max(1, size // 1024)} KiB in {self.folder}: {refusal.strerror}"
            raise CannotKeep(f"{what}: {need}\n{self._advice()}") from None

    def trouble(self, *, ended: bool = False) -> str:
        """Which file the disk still refuses, what is kept and the way out; empty when nothing waits.

        `ended`: the run writes nothing any more.
        """
        self._write()
        if self._refusal is None:
            return ""
        first = next(iter(self._waiting))
        return f"cannot write {first}: {self._refusal.strerror}\n{self._advice(ended=ended)}"

    def _advice(self, *, ended: bool = False) -> str:
        kept = len(list((self.folder / CELLS).glob("*.json")))
        lines = [f"kept: {kept} measured cells in {self.folder / CELLS}"]
        if self._waiting:
            names = ", ".join(path.name for path in self._waiting)
            fate = "not kept" if ended else "in memory, and written by this run once there is room"
            lines.append(f"{fate}: {names}")
        again = f" with --resume {self._run_id}, which leaves out the cells that are kept" if kept else ""
        return "\n".join([*lines, f"way out: make room there, then run again{again}"])

    def _write(self) -> None:
        self._refusal = None
        for path, page in list(self._waiting.items()):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with whole(path) as part:
                    part.write_bytes(page)
            except OSError as refusal:
                self._refusal = refusal
            else:
                del self._waiting[path]
