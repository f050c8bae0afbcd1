"""Recorded traces: read exactly, refused with file and line, shared prefixes shared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.load.plan import plan_cell
from pytest_pdperf.load.target import Target
from pytest_pdperf.load.trace import BLOCK, read_trace, trace_prompt
from pytest_pdperf.spec.workload import Cell, Stream, TraceReplay

ROWS = [
    {"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [7, 9]},
    {"timestamp": 500, "input_length": 512, "output_length": 2, "hash_ids": [7]},
    {"timestamp": 3500, "input_length": 40, "output_length": 5},
]


def write(folder: Path, *rows: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_rows_in_order_of_arrival_from_zero_at_the_asked_speed(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, *ROWS), speed=2.0)
    assert [(r.at_s, r.input_tokens, r.output_tokens) for r in rows] == [
        (0.0, 512, 2),
        (0.5, 700, 3),
        (1.5, 40, 5),
    ]


def test_equal_hash_ids_are_equal_blocks_within_a_run_only(tmp_path: Path) -> None:
    short, long, _ = read_trace(write(tmp_path, *ROWS))
    one = trace_prompt(short, seed=1, salt="r1", vocab=(10, 1000))
    two = trace_prompt(long, seed=1, salt="r1", vocab=(10, 1000))
    assert (len(one), len(two)) == (512, 700)
    assert two[:BLOCK] == one
    assert two[BLOCK:] != one[: 700 - BLOCK]
    assert trace_prompt(short, seed=1, salt="r2", vocab=(10, 1000))[:8] != one[:8]


def test_plan_takes_lengths_times_and_context_from_the_trace(tmp_path: Path) -> None:
    arrival = TraceReplay(path=str(write(tmp_path, *ROWS)), speed=1.0)
    stream = Stream(input_tokens=(1, 1), output_tokens=1, requests=3, arrival=arrival)
    cell = Cell(workload="w", id="t", streams=(stream,), warmups=1)
    (plan,) = plan_cell(cell, Target("http://h", "m", max_context=703), seed=1, salt="r")
    assert [(len(r.prompt), r.output_tokens, r.at_s) for r in plan.requests] == [
        (512, 2, 0.0),
        (700, 3, 1.0),
        (40, 5, 3.0),
    ]
    with pytest.raises(UsageProblem, match="up to 703 tokens"):
        plan_cell(cell, Target("http://h", "m", max_context=702), seed=1, salt="r")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "trace.jsonl:2: not JSON"),
        ("[1]", "trace.jsonl:2: want an object"),
        (
            {"timestamp": 1, "input_lenght": 3, "output_length": 1},
            "'input_length' is missing; is 'input_lenght' meant",
        ),
        (
            {"timestamp": -1, "input_length": 3, "output_length": 1},
            "timestamp must be milliseconds >= 0, got -1",
        ),
        (
            {"timestamp": 1, "input_length": 0, "output_length": 1},
            "input_length must be a whole number >= 1, got 0",
        ),
        ({"timestamp": 1, "input_length": 3, "output_length": True}, "output_length must be a whole number"),
        (
            {"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]},
            "stand for 1..512 tokens",
        ),
        (
            {"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]},
            "stand for 513..1024 tokens",
        ),
        (
            {"timestamp": 1, "input_length": 3, "output_length": 1, "hash_ids": ["a"]},
            "hash_ids must be a list",
        ),
    ],
)
def test_bad_rows_name_their_line(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(UsageProblem, match=message.replace("[", r"\[")):
        read_trace(write(tmp_path, ROWS[0], row))


def test_missing_empty_and_short_traces(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="cannot read the trace: No such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(UsageProblem, match="the trace has no request"):
        read_trace(write(tmp_path, ""))
    with pytest.raises(UsageProblem, match="4 requests asked for, the trace has 3"):
        read_trace(write(tmp_path, *ROWS), limit=4)
    assert len(read_trace(write(tmp_path, *ROWS), limit=2)) == 2
