"""Baselines and history on disk: the only part of the gate that does I/O."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path

from pytest_pdperf.errors import UsageProblem

from .baseline import BaselineFile, BaselineProblem, CellBaseline, dumps, read
from .catalogue import Catalogue
from .fingerprint import BaselineKey, CellRef
from .history import HistoryEntry, history_path, to_line
from .judge import pooled_sessions, pooled_siblings
from .statistics import Pooled, Share
from .update import Change, Mode, Outcome, apply_all, prune

LOCK_NAME = ".pdperf.lock"
LOCK_TIMEOUT_S = 60.0


class BaselineStore:
    """The folder `baselines/` and the folder `history/` beside it.

    Reads are cached for the life of the store, so one session sees one state of each file; updates read
    afresh under a lock.
    """

    def __init__(
        self,
        root: Path,
        catalogue: Catalogue,
        *,
        history: Path | None = None,
        trust_edits: bool = False,
        project: Path | None = None,
    ) -> None:
        """`trust_edits` is for `--update-baselines=fix`: pins edited by hand are read instead of refused.

        Messages show paths relative to `project`, by default the folder above `root`.
        """
        self.root = root
        self._project = project or root.parent
        self.history = history if history is not None else root.parent / "history"
        self._catalogue = catalogue
        self._trust_edits = trust_edits
        self._files: dict[Path, BaselineFile | None] = {}
        self._loaded: dict[BaselineKey, Mapping[tuple[str, str], CellBaseline]] = {}

    def path_of(self, key: BaselineKey) -> Path:
        """`baselines/<gpu>x<n>/<engine>/<model>/<topology>.json`."""
        return self.root.joinpath(*key.place.parts).with_name(key.place.name + ".json")

    def load(self, key: BaselineKey) -> Mapping[tuple[str, str], CellBaseline]:
        """(cell id, workload digest) -> baseline, for the pins comparable with `key`; empty where no file
        is.

        Raises BaselineProblem for a file that cannot be trusted, and for one that lies under another
        hardware's folder.
        """
        if key not in self._loaded:
            file = self._file(self.path_of(key))
            self._loaded[key] = {
                place: CellBaseline(CellRef.parse(place[0], place[1]), pin)
                for place, pin in (file.current(key) if file is not None else {}).items()
            }
        return self._loaded[key]

    def find(self, key: BaselineKey, ref: CellRef) -> CellBaseline | None:
        """The baseline of one cell, or None: see `nearest` for why."""
        return self.load(key).get((ref.id, ref.digest))

    def siblings(self, key: BaselineKey, ref: CellRef) -> dict[str, Pooled]:
        """v0 per metric, pooled over the other cells under the same key."""
        others = {f"{cell} {digest}": baseline for (cell, digest), baseline in self.load(key).items()}
        return pooled_siblings(others, f"{ref.id} {ref.digest}", self._catalogue)

    def sessions(self, key: BaselineKey) -> dict[str, Share]:
        """phi per metric: what part of v0 is left within one session, over every cell under this key."""
        return pooled_sessions(
            {f"{cell} {digest}": baseline for (cell, digest), baseline in self.load(key).items()},
            self._catalogue,
        )

    def nearest(self, key: BaselineKey, ref: CellRef, count: int = 2) -> str:
        """One line for NO_BASELINE: the stored keys that come closest and what differs, or where one would
        be.
        """
        found: list[tuple[int, str]] = []
        for path in sorted(self.root.rglob("*.json")) if self.root.is_dir() else ():
            if path.is_relative_to(self.root / "published"):
                continue
            try:
                file = self._file(path)
            except BaselineProblem:
                continue  # not this cell's file: whoever needs it is told
            if file is None:
                continue
            for pin in file.cells.get(ref.id, ()):
                if pin.status != "current":
                    continue
                differs = list(key.differences(file.keys[pin.key]))
                if pin.workload_digest != ref.digest:
                    differs.append("the workload sends another load under this name")
                found.append((len(differs), f"{self.shown(path)} ({'; '.join(differs)})"))
        if not found:
            where = self.shown(self.root)
            return f"no baseline for {ref.id} in {where}; accept one with --update-baselines=create"
        closest = [text for _, text in sorted(found)[:count]]
        return "no comparable baseline; nearest: " + "; ".join(closest)

    def update(
        self,
        outcomes: Iterable[Outcome],
        mode: Mode,
        reason: str,
        now: datetime,
        *,
        known_cells: Collection[str] | None = None,
    ) -> list[Change]:
        """Store the selected cells' launches, once, and say what changed.

        Files are read again under the lock, so that writers at the same time lose nothing of each other's;
        each is replaced as a whole. `known_cells` (cell ids that still exist) is needed for PRUNE only.
        Raises BaselineProblem before anything is written when any of the files cannot be trusted.
        """
        by_path: dict[Path, list[Outcome]] = {}
        for outcome in outcomes:
            by_path.setdefault(self.path_of(outcome.key), []).append(outcome)
        changes: list[Change] = []
        if not by_path:
            return changes
        with self._lock():
            files = {path: self._fresh(path, trust_edits=mode is Mode.FIX) for path in by_path}
            results: dict[Path, BaselineFile] = {}
            for path, group in by_path.items():
                file, made = self._updated(files[path], group, mode, reason, now, known_cells)
                changes += made
                if file != files[path] and file.cells:
                    results[path] = file
            for path, file in results.items():
                write_atomically(path, dumps(file))
            self._files.clear()
            self._loaded.clear()
        return changes

    def _updated(
        self,
        file: BaselineFile,
        group: list[Outcome],
        mode: Mode,
        reason: str,
        now: datetime,
        known_cells: Collection[str] | None,
    ) -> tuple[BaselineFile, list[Change]]:
        if mode is Mode.PRUNE:
            if known_cells is None:
                raise UsageProblem("--update-baselines=prune needs to know which cells still exist")
            return prune(file, {outcome.ref.workload for outcome in group}, known_cells)
        return apply_all(file, group, mode, reason, now, self._catalogue)

    def append_history(self, entries: Iterable[HistoryEntry]) -> list[Path]:
        """Append every launch, whatever its verdict, to `history/<place>.jsonl`; returns the files."""
        lines: dict[Path, list[str]] = {}
        for entry in entries:
            lines.setdefault(history_path(self.history, entry.key), []).append(to_line(entry))
        if not lines:
            return []
        with self._lock():
            for path, texts in lines.items():
                append_lines(path, texts)
        return sorted(lines)

    def shown(self, path: Path) -> Path:
        """A path as messages show it: relative to the project where it lies inside."""
        return path.relative_to(self._project) if path.is_relative_to(self._project) else path

    def _file(self, path: Path) -> BaselineFile | None:
        if path not in self._files:
            self._files[path] = self._read(path, self._trust_edits) if path.exists() else None
        return self._files[path]

    def _read(self, path: Path, trust_edits: bool) -> BaselineFile:
        shown = self.shown(path)
        file = read(path, self._catalogue, trust_edits=trust_edits, shown=shown)
        _check_place(path.relative_to(self.root), shown, file.keys)
        return file

    def _fresh(self, path: Path, *, trust_edits: bool) -> BaselineFile:
        if not path.exists():
            return BaselineFile(schema=1, keys={}, metrics={}, cells={})
        return self._read(path, trust_edits)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        from filelock import FileLock, Timeout

        self.root.mkdir(parents=True, exist_ok=True)
        lock = self.root / LOCK_NAME
        try:
            with FileLock(str(lock), timeout=LOCK_TIMEOUT_S):
                yield
        except Timeout:
            raise BaselineProblem(
                self.shown(lock),
                f"another run has held the lock for {LOCK_TIMEOUT_S:.0f} s",
                "wait for it, or end it",
            ) from None


def _check_place(path: Path, shown: Path, keys: Mapping[str, BaselineKey]) -> None:
    place = path.with_name(path.name.removesuffix(".json"))
    for digest, key in keys.items():
        if key.place.parts != place.parts:
            raise BaselineProblem(
                shown,
                f"keys.{digest} belongs to {key.place}: other hardware, engine, model or topology",
                "move the file back, or re-measure here with --update-baselines=create",
            )


def write_atomically(path: Path, text: str) -> None:
    """Replace a file as a whole: a crash or a full disk leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append_lines(path: Path, lines: list[str]) -> None:
    """Append whole lines; a half line left by a crash is closed first, so that it spoils only itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as stream:
        size = stream.seek(0, os.SEEK_END)
        if size:
            stream.seek(size - 1)
            if stream.read(1) != b"\n":
                stream.write(b"\n")
        stream.write("".join(line + "\n" for line in lines).encode())
        stream.flush()
        os.fsync(stream.fileno())
