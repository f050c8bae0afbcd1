"""Replaying recorded traffic needs its file read once, by one reader, for planning and for sending alike.

The format is that of the Mooncake traces: JSON lines with `timestamp` (milliseconds from the start),
`input_length`, `output_length` (tokens) and `hash_ids` (one id for each 512-token block of the prompt; equal
leading ids mean a shared prefix).
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_pdperf.errors import UsageProblem

BLOCK_TOKENS = 512
MAX_LINES = 1_000_000
_NEEDED = ("timestamp", "input_length", "output_length")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    at_s: float
    """Seconds from the start of the trace."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, limit: int | None = None) -> tuple[TraceRequest, ...]:
    """Requests of a trace file in order of time, at most `limit` of them.

    Raises UsageProblem, naming file and line, for anything that is not such a trace.
    """
    found: list[TraceRequest] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if limit is not None and len(found) >= limit:
                    break
                if number > MAX_LINES:
                    raise UsageProblem(f"{path}:{number}: more than {MAX_LINES} lines")
                if line.strip():
                    found.append(_parse(line, f"{path}:{number}", found[-1].at_s if found else 0.0))
    except OSError as error:
        raise UsageProblem(f"{path}: the trace cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageProblem(f"{path}: the trace is not UTF-8 text") from None
    if not found:
        raise UsageProblem(f"{path}: the trace is empty")
    return tuple(found)


def digest(requests: Sequence[TraceRequest]) -> str:
    """SHA-256 over times, lengths and shared prefixes: equal for equal load, whatever the file's layout."""
    sha = hashlib.sha256()
    for r in requests:
        sha.update(f"{r.at_s!r} {r.input_tokens} {r.output_tokens} {r.hash_ids}\n".encode())
    return sha.hexdigest()


def _parse(line: str, where: str, previous_s: float) -> TraceRequest:
    try:
        data = json.loads(line, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        raise UsageProblem(f"{where}: not a JSON object: {line.strip()[:60]!r}") from None
    if not isinstance(data, dict):
        raise UsageProblem(f"{where}: not a JSON object: {line.strip()[:60]!r}")
    for key in _NEEDED:
        if key not in data:
            near = difflib.get_close_matches(key, data, 1)
            hint = f"; is {near[0]!r} meant?" if near else ""
            raise UsageProblem(f"{where}: key {key!r} is missing{hint}")
    at_ms = data["timestamp"]
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not 0 <= at_ms < 1e12:
        raise UsageProblem(f"{where}: timestamp must be milliseconds from the start, got {at_ms!r}")
    if at_ms / 1e3 < previous_s:
        raise UsageProblem(f"{where}: timestamp {at_ms!r} goes back; sort the trace by timestamp")
    lengths = []
    for key in _NEEDED[1:]:
        value = data[key]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10_000_000:
            raise UsageProblem(f"{where}: {key} must be a positive number of tokens, got {value!r}")
        lengths.append(value)
    ids = data.get("hash_ids", [])
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise UsageProblem(f"{where}: hash_ids must be a list of whole numbers")
    least, most = (len(ids) - 1) * BLOCK_TOKENS + 1, len(ids) * BLOCK_TOKENS
    if ids and not least <= lengths[0] <= most:
        raise UsageProblem(
            f"{where}: {len(ids)} hash_ids stand for {least}..{most} tokens, input_length is {lengths[0]}"
        )
    return TraceRequest(at_ms / 1e3, lengths[0], lengths[1], tuple(ids))
