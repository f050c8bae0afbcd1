"""Arrivals and lengths from a recorded trace, in the JSON-lines format that Mooncake published.

Each line: `timestamp` (ms since the start), `input_length`, `output_length`, and optionally `hash_ids`, one
id for each block of 512 prompt tokens; equal ids mean equal blocks, which is how the format expresses shared
prefixes.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import orjson

from pytest_pdperf.errors import UsageProblem

from .prompts import generator

BLOCK = 512
_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, *, limit: int | None = None, speed: float = 1.0) -> tuple[TraceRow, ...]:
    """Rows of a trace in order of arrival, the first `limit` of them, times divided by `speed`.

    Times are shifted so that the first request is at 0. Raises UsageProblem with file and line for anything
    unusable.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as problem:
        raise UsageProblem(f"{path}: cannot read the trace: {problem.strerror}") from problem
    rows: list[TraceRow] = []
    for number, line in enumerate(lines, 1):
        if limit is not None and len(rows) >= limit:
            break
        if line.strip():
            rows.append(_row(path, number, line))
    if not rows:
        raise UsageProblem(f"{path}: the trace has no request")
    if limit is not None and len(rows) < limit:
        raise UsageProblem(f"{path}: {limit} requests asked for, the trace has {len(rows)}; lower `requests`")
    rows.sort(key=lambda row: row.at_s)
    start = rows[0].at_s
    return tuple(
        TraceRow((row.at_s - start) / speed, row.input_tokens, row.output_tokens, row.hash_ids)
        for row in rows
    )


def _row(path: Path, number: int, line: bytes) -> TraceRow:
    try:
        data = orjson.loads(line)
    except orjson.JSONDecodeError as problem:
        raise UsageProblem(f"{path}:{number}: not JSON: {problem}") from problem
    if not isinstance(data, dict):
        raise UsageProblem(f"{path}:{number}: want an object with {', '.join(_KEYS)}, got {line[:60]!r}")
    for key in _KEYS[:3]:
        if key not in data:
            near = difflib.get_close_matches(key, data, 1)
            hint = f"; is {near[0]!r} meant?" if near else ""
            raise UsageProblem(f"{path}:{number}: key {key!r} is missing{hint}")
    at, tokens_in, tokens_out = (data[key] for key in _KEYS[:3])
    if not isinstance(at, int | float) or at < 0:
        raise UsageProblem(f"{path}:{number}: timestamp must be milliseconds >= 0, got {at!r}")
    for key, value in (("input_length", tokens_in), ("output_length", tokens_out)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageProblem(f"{path}:{number}: {key} must be a whole number >= 1, got {value!r}")
    ids = data.get("hash_ids") or []
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise UsageProblem(f"{path}:{number}: hash_ids must be a list of whole numbers")
    if ids and not (len(ids) - 1) * BLOCK < tokens_in <= len(ids) * BLOCK:
        raise UsageProblem(
            f"{path}:{number}: {len(ids)} hash_ids stand for {(len(ids) - 1) * BLOCK + 1}.."
            f"{len(ids) * BLOCK} tokens, input_length is {tokens_in}"
        )
    return TraceRow(at / 1e3, tokens_in, tokens_out, tuple(ids))


def trace_prompt(row: TraceRow, *, seed: int, salt: str, vocab: tuple[int, int]) -> tuple[int, ...]:
    """Prompt of a row with `hash_ids`: blocks with one id are equal within a run and differ between runs
    (salt).
    """
    low, high = vocab
    tokens: list[int] = []
    for block in row.hash_ids:
        tokens.extend(generator("trace-block", seed, salt, block).integers(low, high, size=BLOCK).tolist())
    return tuple(tokens[: row.input_tokens])
