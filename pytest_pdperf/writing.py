"""Files that are there as a whole or not at all, so that a crash or a full disk never leaves half a one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to: it takes that place at the end of the block, and is gone after an error.

    Raises what the block raises, and OSError.
    """
    part = path.with_name(path.name + ".part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def try_room(folder: Path, size: int) -> None:
    """Take `size` bytes of disk in a folder and give them back: quotas and reserves show in no count of free blocks.

    Raises OSError.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)
