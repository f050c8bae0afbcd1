"""Workload files: short forms become the cells that they promise, and impossible ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.fit import max_context, misfit
from pytest_pdperf.spec.loader import (
    available,
    find_topologies,
    find_workload,
    load_workload,
    shipped_fixtures,
)
from pytest_pdperf.spec.trace import BLOCK_TOKENS, read_trace
from pytest_pdperf.spec.workload import Cell, ClosedLoop, OpenLoop, Stream, TraceReplay, Workload

SHIPPED = [shipped_fixtures()]


def load(tmp_path: Path, text: str, name: str = "mine") -> Workload:
    path = tmp_path / f"{name}.yaml"
    path.write_text(text)
    return load_workload(path)


def trace_line(at_ms: float, tokens: int, output: int) -> str:
    blocks = list(range(-(-tokens // BLOCK_TOKENS)))
    return json.dumps(
        {"timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": blocks}
    )


def test_fixed_shapes_is_the_published_matrix() -> None:
    workload = find_workload("fixed-shapes", SHIPPED)
    found = {(c.main.input_tokens[0], c.main.output_tokens, c.concurrency): c for c in workload.cells}
    shapes = [(512, 256), (4096, 128), (256, 1024), (8192, 128)]
    assert list(found) == [(i, o, c) for i, o in shapes for c in (1, 4, 8, 16)]
    for (tokens, output, level), cell in found.items():
        assert cell.id == f"in{tokens}-out{output}-c{level}"
        assert cell.main.input_tokens == (tokens, tokens)
        assert cell.main.requests == (64 if level == 16 else 32)
        assert cell.warmups == 4
        assert cell.workload == "fixed-shapes"


def test_mixed_load_is_one_cell_of_two_streams() -> None:
    (cell,) = find_workload("mixed-load", SHIPPED).cells
    assert cell.id == "mixed-load"
    steady, burst = cell.streams
    assert (steady.name, steady.input_tokens, steady.output_tokens, steady.requests) == (
        "steady",
        (512, 512),
        256,
        64,
    )
    assert steady.arrival == ClosedLoop(concurrency=4)
    assert (burst.name, burst.input_tokens, burst.output_tokens, burst.requests) == (
        "burst",
        (4096, 8192),
        64,
        40,
    )
    assert burst.arrival == ClosedLoop(concurrency=4, think_s=2)
    assert cell.max_context == 8192 + 64


def test_first_measurement_has_exact_lengths_and_counts() -> None:
    cells = find_workload("first-measurement", SHIPPED).cells
    assert [(c.concurrency, c.main.requests) for c in cells] == [(1, 6), (8, 24), (16, 32)]
    assert all(c.main.input_tokens == (256, 256) and c.main.output_tokens == 256 for c in cells)


def test_quick_stays_quick() -> None:
    """Estimated on the simulator's fast profile: 5 ms a step, 20k tokens/s of prefill, 20 ms for everything else."""
    total = 0.0
    cells = find_workload("quick", SHIPPED).cells
    for cell in cells:
        tokens, level = cell.main.input_tokens[1], cell.concurrency
        assert level is not None
        one = 0.020 + tokens / 20_000 + cell.main.output_tokens * 0.005
        rounds = max(one / level, tokens / 20_000)
        estimate = (cell.main.requests + cell.warmups) * rounds
        assert estimate < 4.5, cell.id
        total += estimate
    assert total < 25
    assert {c.concurrency for c in cells} == {1, 4, 8}


def test_cpu_smoke_fits_the_tiny_model() -> None:
    for name in ("cpu-smoke", "cpu-blocks", "cpu-sweep"):
        assert all(cell.max_context <= 1024 for cell in find_workload(name, SHIPPED).cells)


def test_sweep_covers_what_it_says() -> None:
    cells = find_workload("sweep", SHIPPED).cells
    levels = {c.concurrency for c in cells if c.main.input_tokens == (512, 512) and c.concurrency}
    assert levels == {1, 2, 4, 8, 16, 32, 64, 128, 256}
    assert any(c.main.input_tokens == (32768, 32768) for c in cells)
    arrivals = [c.main.arrival for c in cells]
    processes = {a.process for a in arrivals if isinstance(a, OpenLoop)}
    assert processes == {"poisson", "constant", "gamma"}
    assert any(isinstance(a, OpenLoop) and a.ramp_to_rps == 16 for a in arrivals)
    traces = [a for a in arrivals if isinstance(a, TraceReplay)]
    assert [t.speed for t in traces] == [1, 2]
    ids = [c.id for c in cells]
    assert "in512-out256-poisson4rps" in ids
    assert "in512-out256-gamma4rps-b0.5" in ids
    assert "in512-out256-poisson1to16rps" in ids
    assert "trace-conversation-x2" in ids
    assert all(c.timeout_s == 1800 for c in cells)
    assert {c.slo.ttft_ms for c in cells} == {2000, 20000}, "a group overrides the file's SLO"


def test_every_shipped_workload_loads_with_enough_requests_for_its_clients() -> None:
    names = available("workloads", SHIPPED)
    assert set(names) >= {"fixed-shapes", "mixed-load", "first-measurement", "quick", "cpu-smoke", "sweep"}
    for name in names:
        for cell in find_workload(name, SHIPPED).cells:
            assert cell.concurrency is None or cell.main.requests >= cell.concurrency


def test_requests_left_out(tmp_path: Path) -> None:
    cells = load(tmp_path, "shapes: 64/32\nconcurrency: [1, 8, 64]").cells
    assert [c.main.requests for c in cells] == [32, 32, 256]


def test_as_many_requests_as_clients_are_enough(tmp_path: Path) -> None:
    (cell,) = load(tmp_path, "shapes: 64/32\nconcurrency: 8\nrequests: 8").cells
    assert (cell.concurrency, cell.main.requests) == (8, 8)


def test_requests_table(tmp_path: Path) -> None:
    cells = load(tmp_path, "shapes: [64/32]\nconcurrency: [1, 4, 8]\nrequests: {default: 16, 4: 20}").cells
    assert [c.main.requests for c in cells] == [16, 20, 16]


def test_shape_with_a_range_and_thinking_clients(tmp_path: Path) -> None:
    (cell,) = load(tmp_path, "shapes: 64-128/32\nconcurrency: 2\nthink_s: 0.5").cells
    assert cell.id == "in64-128-out32-c2-think0.5s"
    assert cell.main.input_tokens == (64, 128)
    assert cell.main.arrival == ClosedLoop(concurrency=2, think_s=0.5)


def test_closed_and_open_loop_side_by_side(tmp_path: Path) -> None:
    text = "shapes: 64/32\nconcurrency: [1]\narrivals: [{rate_rps: 2.5, process: constant}]\nrequests: 8"
    ids = [c.id for c in load(tmp_path, text).cells]
    assert ids == ["in64-out32-c1", "in64-out32-constant2.5rps"]


def test_streams_with_own_arrivals(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n".join(trace_line(i * 10, 100 + i, 20) for i in range(5)))
    text = (
        "id: busy\nstreams:\n"
        "  open: {shape: 64/32, requests: 8, arrival: {rate_rps: 3}}\n"
        "  replay: {requests: 4, arrival: {trace: t.jsonl, speed: 0.5}}\n"
    )
    (cell,) = load(tmp_path, text).cells
    assert cell.id == "busy"
    opened, replay = cell.streams
    assert opened.arrival == OpenLoop(rate_rps=3)
    assert (replay.requests, replay.input_tokens, replay.output_tokens) == (4, (100, 103), 20)
    assert cell.concurrency is None


def test_a_trace_is_known_by_content_not_by_place(tmp_path: Path) -> None:
    text = "arrivals: [{trace: t.jsonl}]"
    cells: list[Cell] = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t.jsonl").write_text(
            trace_line(0, 10, 5) + "\n\n" + trace_line(7, 12, 6) + "\n"
        )
        cells += load(tmp_path / folder, text).cells
    assert cells[0].id == "trace-t"
    assert cells[0].main.requests == 2
    assert cells[0].load == cells[1].load
    assert str(tmp_path) not in json.dumps(cells[0].load)
    (tmp_path / "b" / "t.jsonl").write_text(trace_line(0, 10, 5) + "\n" + trace_line(8, 12, 6))
    (other,) = load(tmp_path / "b", text).cells
    assert other.load != cells[0].load


def test_load_tells_apart_what_is_sent() -> None:
    cells = find_workload("fixed-shapes", SHIPPED).cells
    loads = [json.dumps(c.load, sort_keys=True) for c in cells]
    assert len(set(loads)) == len(loads)
    renamed = cells[0].model_copy(update={"id": "other", "workload": "other", "timeout_s": 1.0})
    assert renamed.load == cells[0].load


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "shapes: [512x256]\nconcurrency: 1",
            "mine.yaml:1: shapes.0: '512x256' is not a shape; write input/output",
        ),
        (
            "shapes:\n  - 64/32\n  - 128-64/32\nconcurrency: 1",
            "mine.yaml:3: shapes.1: '128-64/32' runs backwards",
        ),
        ("shapes: 0/32\nconcurrency: 1", "must be 1 to"),
        ("shapes: 64/0\nconcurrency: 1", "must be 1 to"),
        ("shapes: 99999999/32\nconcurrency: 1", "must be 1 to"),
        ("shapes: []\nconcurrency: 1", "mine.yaml:1: shapes: must not be empty"),
        ("shapes: 64/32", "shapes need concurrency (closed loop) or arrivals (open loop)"),
        ("concurrency: 1", "needs exactly one of shapes (a matrix) and streams (a mix)"),
        ("shapes: 64/32\nconcurrency: []", "mine.yaml:2: concurrency: must not be empty"),
        ("shapes: 64/32\nconcurrency: [1, 0]", "mine.yaml:2: concurrency.1: must be 1 to 65536, got 0"),
        ("shapes: 64/32\nconcurrency: [4, 4]", "concurrency.1: 4 is named twice"),
        ("shapes: 64/32\nconcurrency: many", "concurrency: must be a whole number or a list, got 'many'"),
        (
            "shapes: 64/32\nconcurrency: [8]\nrequests: 7",
            "mine.yaml:3: requests: 7 requests can never keep 8 clients",
        ),
        ("shapes: 64/32\nconcurrency: 1\nrequests: 0", "requests: must be 1 to 1000000, got 0"),
        (
            "shapes: 64/32\nconcurrency: [1, 16]\nrequests:\n  default: 32\n  18: 64",
            "mine.yaml:5: requests.18: '18' is not a concurrency of this group; did you mean '1'?",
        ),
        ("shapes: 64/32\nconcurrency: [1, 4]\nrequests: {4: 8}", "says nothing for concurrency 1"),
        (
            "shapes: 64/32\narrivals: [{rate_rps: 1}]\nrequests: {}",
            "says nothing for arrivals; add `default:`",
        ),
        ("shapes: 64/32\nconcurency: 1", "mine.yaml:2: concurency: unknown key; did you mean 'concurrency'?"),
        ("shapes: 64/32\nconcurrency: 1\nslo: {ttft: 5}", "slo.ttft: unknown key; did you mean 'ttft_ms'?"),
        ("shapes: 64/32\nconcurrency: 1\nslo: {ttft_ms: 0}", "slo.ttft_ms: must be more than 0, got 0"),
        ("shapes: 64/32\nconcurrency: 1\nwarmups: -1", "warmups: must be at least 0, got -1"),
        ("shapes: 64/32\nconcurrency: 1\ntimeout_s: 0", "timeout_s: must be more than 0"),
        ("shapes: 64/32\nconcurrency: 1\nid: x", "id: belongs to a mix"),
        ("shapes: 64/32\narrivals: [{rate_rps: 1}]\nthink_s: 1", "think_s: goes with concurrency"),
        ("shapes: 64/32\narrivals: [{rate_rps: 1, trace: x}]", "arrivals.0: an arrival needs exactly one of"),
        ("shapes: 64/32\narrivals: [{}]", "arrivals.0: an arrival needs exactly one of"),
        ("shapes: 64/32\narrivals: [{rate_rps: -1}]", "arrivals.0.rate_rps: must be more than 0, got -1"),
        (
            "shapes: 64/32\narrivals: [{rate_rps: 1, process: poison}]",
            "'poison' is not known; did you mean 'poisson'?",
        ),
        ("shapes: 64/32\narrivals: [{rate_rps: 1, burstiness: 2}]", "burstiness needs process: gamma"),
        ("shapes: 64/32\narrivals: [{rate_rps: 1, speed: 2}]", "speed goes with a trace"),
        ("arrivals: [{trace: none.jsonl}]", "mine.yaml:1: arrivals.0.trace: no trace 'none.jsonl' beside"),
        (
            "shapes: 64/32\narrivals: [{rate_rps: 2}, {rate_rps: 2}]",
            "cell 'in64-out32-poisson2rps' is already",
        ),
        ("streams: {}", "streams: must not be empty"),
        ("streams: {a: {shape: 64/32, concurrency: 1}}", "streams.a.requests: this key is missing"),
        ("streams: {a: {requests: 4, concurrency: 1}}", "streams.a.shape: this key is missing"),
        ("streams: {a: {shape: 64/32, requests: 4}}", "streams.a: a stream needs exactly one of"),
        (
            "streams: {a: {shape: 64/32, requests: 1, concurrency: 2}}",
            "streams.a.requests: 1 requests can never",
        ),
        (
            "streams: {a: {shape: 64/32, requests: 4, concurrency: 2}}\nrequests: 3",
            "mine.yaml:2: requests: belongs inside",
        ),
        ("streams: {a: {shape: 64/32, requests: 4, concurrency: 2}}\nid: a/b", "may hold only letters"),
        ("groups: []", "groups: must not be empty"),
        (
            "groups: [{shapes: 64/32, concurrency: 1}]\nshapes: 64/32",
            "mine.yaml:2: shapes: goes inside the groups",
        ),
        (
            "groups:\n  - {shapes: 64/32, concurrency: 1}\n  - {shapes: 64/32, concurrency: 1}",
            "mine.yaml:3: groups.1: cell 'in64-out32-c1' is already defined on line 2",
        ),
        ("groups:\n  - {shapes: 64/32, concurrency: 1, groups: []}", "groups.0.groups: unknown key"),
    ],
)
def test_errors_name_line_key_and_way_out(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "t.jsonl:2: not a JSON object"),
        ("[1]", "t.jsonl:2: not a JSON object"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}', "timestamp must be milliseconds"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "timestamp must be milliseconds"),
        ('{"timestamp": true, "input_length": 1, "output_length": 1}', "timestamp must be milliseconds"),
        ('{"timestamp": 3, "input_length": 1, "output_length": 1}', "timestamp 3 goes back"),
        ('{"timestamp": 9, "input_length": 0, "output_length": 1}', "input_length must be a positive number"),
        (
            '{"timestamp": 9, "input_length": 1.5, "output_length": 1}',
            "input_length must be a positive number",
        ),
        (
            '{"timestamp": 9, "input_length": 1}',
            "t.jsonl:2: key 'output_length' is missing",
        ),
        (
            '{"timestamp": 9, "input_lenght": 1, "output_length": 1}',
            "key 'input_length' is missing; is 'input_lenght' meant?",
        ),
        (
            '{"timestamp": 9, "input_length": 1, "output_length": true}',
            "output_length must be a positive number of tokens, got True",
        ),
        (
            '{"timestamp": 9, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "1 hash_ids stand for 1..512 tokens, input_length is 513",
        ),
        (
            '{"timestamp": 9, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}',
            "2 hash_ids stand for 513..1024 tokens, input_length is 512",
        ),
        (
            '{"timestamp": 9, "input_length": 1, "output_length": 1, "hash_ids": "x"}',
            "hash_ids must be a list",
        ),
        (
            '{"timestamp": 9, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}',
            "hash_ids must be a list",
        ),
    ],
)
def test_bad_traces(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(trace_line(5, 10, 10) + "\n" + line)
    with pytest.raises(UsageProblem) as caught:
        read_trace(path)
    assert message in str(caught.value)


def test_traces_in_seconds_limited_and_never_empty(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(trace_line(1500 * i, 10, 10) for i in range(3)))
    assert [r.at_s for r in read_trace(path)] == [0, 1.5, 3]
    assert len(read_trace(path, limit=2)) == 2
    path.write_text("\n")
    with pytest.raises(UsageProblem, match="empty"):
        read_trace(path)
    with pytest.raises(UsageProblem, match="cannot be read"):
        read_trace(tmp_path / "none")
    (tmp_path / "t.jsonl").write_text(trace_line(0, 1, 1))
    with pytest.raises(UsageProblem, match="the trace has 1 requests, 2 are asked for"):
        load(tmp_path, "arrivals: [{trace: t.jsonl}]\nrequests: 2")


def test_models_refuse_what_files_cannot_say() -> None:
    stream = Stream(input_tokens=(1, 2), output_tokens=1, requests=4, arrival=ClosedLoop(concurrency=4))
    with pytest.raises(ValidationError, match="can never keep 5 clients busy"):
        Stream(input_tokens=(1, 2), output_tokens=1, requests=4, arrival=ClosedLoop(concurrency=5))
    with pytest.raises(ValidationError, match="stream names must differ"):
        Cell(workload="w", id="x", streams=(stream, stream))
    with pytest.raises(ValidationError, match="may hold only letters"):
        Cell(workload="w", id="x y", streams=(stream,))
    cell = Cell(workload="w", id="x", streams=(stream,))
    with pytest.raises(ValidationError, match="cell ids must differ"):
        Workload(name="w", cells=(cell, cell))


def test_context_that_does_not_fit_is_found_before_the_start(tmp_path: Path) -> None:
    tp2, free = find_topologies(["pd-1p2d-tp2", "pd-1p2d"], SHIPPED)
    cells = {c.id: c for c in find_workload("sweep", SHIPPED).cells}
    long = cells["in32768-out128-c1"]
    assert max_context(tp2) == 16384
    assert max_context(free) is None
    assert misfit(tp2, cells["in512-out256-c1"]) is None
    reason = misfit(tp2, long)
    assert reason is not None
    assert "needs 32896 tokens of context, pd-1p2d-tp2 has 16384" in reason
    assert misfit(free, long) is None
    assert misfit(free, long, model_limit=32896) is None
    assert misfit(free, long, model_limit=32895) is not None
    wide = free.model_copy(update={"engine_args": {"max_model_len": 32896}})
    assert misfit(wide, long, model_limit=16384) is None, "the model's limit is for roles that are not told"
    (tmp_path / "t.yaml").write_text(
        "kind: pd\nengine_args: {max_model_len: 100}\n"
        "roles: {prefill: {args: {max_model_len: 80}}, decode: {args: {max_model_len: 200}}}"
    )
    (own,) = find_topologies([str(tmp_path / "t.yaml")], [])
    assert max_context(own) == 80, "a role's own argument replaces the common one; the smallest role decides"
