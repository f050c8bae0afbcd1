"""How long a process could have run while another had its core: what the scheduler took is no cost of a client."""

from __future__ import annotations

from pathlib import Path


def waited_s(path: Path = Path("/proc/self/schedstat")) -> float | None:
    """How long this process could have run so far and did not; None where the kernel does not say."""
    try:
        return int(path.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


def since(before: float | None) -> float | None:
    """What was waited since then."""
    now = waited_s()
    return None if before is None or now is None else now - before
