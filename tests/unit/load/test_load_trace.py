"""Recorded traces as load: due times, lengths, and prefixes that are shared within a run only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.load.plan import plan_cell
from pytest_pdperf.load.planned import StreamPlan
from pytest_pdperf.load.prompts import trace_prompt
from pytest_pdperf.load.target import Target
from pytest_pdperf.spec.trace import BLOCK_TOKENS, read_trace
from pytest_pdperf.spec.workload import Cell, Stream, TraceReplay

ROWS = [
    {"timestamp": 500, "input_length": 512, "output_length": 2, "hash_ids": [7]},
    {"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [7, 9]},
    {"timestamp": 3500, "input_length": 40, "output_length": 5},
]


def write(folder: Path, *rows: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def planned(path: Path, requests: int = 3, speed: float = 1.0, max_context: int | None = None) -> StreamPlan:
    arrival = TraceReplay(path=str(path), speed=speed)
    stream = Stream(input_tokens=(1, 1), output_tokens=1, requests=requests, arrival=arrival)
    cell = Cell(workload="w", id="t", streams=(stream,), warmups=1)
    return plan_cell(cell, Target("http://h", "m", max_context=max_context), seed=1, salt="r")[0]


def test_due_times_start_at_zero_and_shrink_with_the_speed(tmp_path: Path) -> None:
    plan = planned(write(tmp_path, *ROWS), speed=2.0)
    assert [(r.at_s, len(r.prompt), r.output_tokens) for r in plan.requests] == [
        (0.0, 512, 2),
        (0.5, 700, 3),
        (1.5, 40, 5),
    ]


def test_equal_hash_ids_are_equal_blocks_within_a_run_only(tmp_path: Path) -> None:
    short, long, _ = read_trace(write(tmp_path, *ROWS))
    one = trace_prompt(short, seed=1, salt="r1", vocab=(10, 1000))
    two = trace_prompt(long, seed=1, salt="r1", vocab=(10, 1000))
    assert (len(one), len(two)) == (512, 700)
    assert two[:BLOCK_TOKENS] == one
    assert two[BLOCK_TOKENS:] != one[: 700 - BLOCK_TOKENS]
    assert trace_prompt(short, seed=1, salt="r2", vocab=(10, 1000))[:8] != one[:8]


def test_requests_that_share_blocks_share_their_prompts_prefix(tmp_path: Path) -> None:
    first, second, _ = planned(write(tmp_path, *ROWS)).requests
    assert second.prompt[:BLOCK_TOKENS] == first.prompt


def test_the_traces_lengths_must_fit_the_context(tmp_path: Path) -> None:
    path = write(tmp_path, *ROWS)
    planned(path, max_context=703)
    with pytest.raises(UsageProblem, match="up to 703 tokens"):
        planned(path, max_context=702)


def test_a_trace_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="4 requests asked for, the trace has 3"):
        planned(write(tmp_path, *ROWS), requests=4)
    assert len(planned(write(tmp_path, *ROWS), requests=2).requests) == 2
