"""Run folders made by hand: a scripted server's stamps and outcomes, so that every number in a report is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson

from pytest_pdperf.evidence.ttft_split import STAGES, TtftSplit
from pytest_pdperf.gate.baseline import Launch
from pytest_pdperf.gate.fingerprint import BaselineKey
from pytest_pdperf.gate.history import HistoryEntry, to_line
from pytest_pdperf.gate.verdict import Verdict, VerdictRow
from pytest_pdperf.load.results import write_records
from pytest_pdperf.measure.cell_result import CellResult, MetricValue
from pytest_pdperf.measure.records import CellRecords, RequestRecord, Status
from pytest_pdperf.measure.summarise import summarise
from pytest_pdperf.report.outcomes import CellOutcome, save
from pytest_pdperf.spec.workload import Cell, ClosedLoop, Stream

MS = 1_000_000
START = 1_700_000_000 * 1_000_000_000


def request(
    index: int,
    *,
    sent_ms: float = 0.0,
    ttft_ms: float = 50.0,
    gaps_ms: Sequence[float] = (10.0,) * 7,
    status: Status = Status.OK,
    stream: str = "main",
    warmup: bool = False,
    error: str = "",
) -> RequestRecord:
    """One request that sends its first token after `ttft_ms` and the others after the given gaps."""
    times, at = [], sent_ms + ttft_ms
    for gap in (0.0, *gaps_ms):
        at += gap
        times.append(START + round(at * MS))
    count = len(times)
    return RequestRecord(
        stream=stream,
        index=index,
        warmup=warmup,
        status=status,
        planned_input_tokens=512,
        planned_output_tokens=count,
        sent_ns=START + round(sent_ms * MS),
        end_ns=times[-1],
        event_ns=tuple(times),
        event_lag_ns=(1000,) * count,
        event_tokens=(1,) * count,
        prompt_tokens=512,
        completion_tokens=count,
        finish_reason="length",
        http_status=200,
        error=error,
        output_tokens=count,
        token_count_source="usage",
    )


def closed_loop(clients: int, ttfts_ms: Sequence[float], tokens: int = 8) -> list[RequestRecord]:
    """A request for each TTFT, sent by `clients` that are never idle; a token every 10 ms."""
    free = [0.0] * clients
    made = []
    for index, ttft in enumerate(ttfts_ms):
        client = free.index(min(free))
        made.append(request(index, sent_ms=free[client], ttft_ms=ttft, gaps_ms=(10.0,) * (tokens - 1)))
        free[client] = ((made[-1].end_ns or 0) - START) / MS
    return made


def records(requests: Sequence[RequestRecord], clients: int = 1) -> CellRecords:
    """Those requests as a cell's records, all clients of it once busy."""
    return CellRecords(
        requests=tuple(requests),
        stamp_source="kernel",
        started_ns=START,
        ended_ns=max(r.end_ns or 0 for r in requests),
        max_in_flight=clients,
        reached_concurrency={"main": clients},
    )


def cell_of(shape: str = "512/256", concurrency: int = 1, requests: int = 8) -> Cell:
    """A closed-loop cell with the id that the workload reader would give it."""
    tokens_in, _, tokens_out = shape.partition("/")
    stream = Stream(
        input_tokens=(int(tokens_in), int(tokens_in)),
        output_tokens=int(tokens_out),
        requests=requests,
        arrival=ClosedLoop(concurrency=concurrency),
    )
    return Cell(
        workload="fixed-shapes", id=f"in{tokens_in}-out{tokens_out}-c{concurrency}", streams=(stream,)
    )


def result(cell: str = "in512-out256-c1", topology: str = "pd-1p2d", **metrics: float | None) -> CellResult:
    """A result with these metrics, 64 samples each."""
    values = {name: MetricValue(value, 64) for name, value in metrics.items()}
    return CellResult(
        topology=topology, workload="fixed-shapes", cell=cell, metrics=values, requests=64, ok=64
    )


def outcome(
    cell: str = "in512-out256-c1",
    topology: str = "pd-1p2d",
    *,
    verdict: str = "PASS",
    kind: str = "",
    engine: str = "vllm",
    launch: int = 1,
    order: int = 0,
    rows: tuple[str, ...] = (),
    judged: tuple[VerdictRow, ...] = (),
    **metrics: float | None,
) -> CellOutcome:
    """A judged cell."""
    found_kind = kind or ("aggregated" if topology.startswith("aggregated") else "pd")
    return CellOutcome(
        nodeid=f"tests/perf/test_fixed_shapes.py::test_fixed_shapes[{topology}-{cell}]",
        order=order,
        topology=topology,
        kind=found_kind,
        engine=engine,
        launch=launch,
        result=result(cell, topology, **(metrics or {"ttft_ms_p50": 100.0, "output_tps": 1000.0})),
        verdict=verdict,
        rows=rows,
        evidence="proven" if found_kind == "pd" else "not_applicable",
        judged=judged,
    )


def judged_row(metric: str, verdict: Verdict, value: float, baseline: float, change: float) -> VerdictRow:
    """A row of the gate with a limit of 10 %."""
    return VerdictRow(
        metric=metric,
        verdict=verdict,
        unit="ms",
        direction=-1 if metric == "output_tps" else 1,
        value=value,
        baseline=baseline,
        change=change,
        limit=0.1,
        n=64,
        launches=5,
    )


def split(measured: float, **stages: float) -> TtftSplit:
    """A TTFT split with the named stages, the rest unknown."""
    found: dict[str, float | None] = dict.fromkeys(STAGES)
    found |= stages
    return TtftSplit(measured, found, measured - sum(stages.values()))


def write_cell(
    folder: Path, topology: str, cell: Cell, requests: Sequence[RequestRecord], **changes: object
) -> CellOutcome:
    """Store one measured cell as a run does: records, result and verdict."""
    place = folder / "records" / topology / cell.id
    place.mkdir(parents=True, exist_ok=True)
    found = records(requests, cell.concurrency or 1)
    write_records(
        place,
        found.requests,
        {
            "stamp_source": found.stamp_source,
            "started_ns": found.started_ns,
            "ended_ns": found.ended_ns,
            "max_in_flight": found.max_in_flight,
            "reached_concurrency": found.reached_concurrency,
            "client_cpu_s": 0.1,
            "warnings": [],
        },
    )
    made = replace(
        outcome(cell.id, topology, engine="sim"),
        result=summarise(found, cell, topology),
        **changes,  # type: ignore[arg-type]
    )
    save(made, folder / "cells")
    return made


def write_environment(folder: Path, launch: str, **more: object) -> None:
    """Store an environment record."""
    place = folder / "environment"
    place.mkdir(parents=True, exist_ok=True)
    record = {
        "host": "0123456789ab",
        "kernel": "6.1",
        "cpu": "Some CPU",
        "cpus": 2,
        "memory_gib": 24.0,
        "versions": {"engine": "0.1.0+simulated", "router": "0.1.17"},
        "commands": {"prefill-0": "engine --role prefill"},
        "env": {"host": {"NCCL_DEBUG": "INFO"}},
        "facts": {"model": "fast"},
        **more,
    }
    (place / f"{launch}.json").write_bytes(orjson.dumps(record))


def small_run(folder: Path) -> Path:
    """Two topologies at three concurrencies of one shape, 8 requests a cell; PD is the slower one."""
    for topology, slow in (("pd-1p2d", 2.0), ("aggregated-3x", 1.0)):
        for order, concurrency in enumerate((1, 4, 8)):
            requests = closed_loop(concurrency, [slow * (40 + i + 5 * concurrency) for i in range(8)])
            write_cell(
                folder,
                topology,
                cell_of(concurrency=concurrency),
                requests,
                order=order,
                verdict="NO_BASELINE",
            )
        write_environment(folder, topology)
    return folder


def history_of(
    folder: Path, values: Sequence[float], topology: str = "pd-1p2d", cell: str = "in512-out256-c16"
) -> Path:
    """A history of one cell of vLLM on six H100: a launch a night, FAIL beyond 150 ms of TTFT."""
    key = BaselineKey(
        gpu="NVIDIA H100",
        gpu_count=6,
        link="NV18",
        engine="vllm",
        model="qwen3-32b",
        dtype="auto",
        topology=topology,
        topology_digest="0" * 16,
        definitions="pdperf-1",
        simulated=False,
    )
    lines = []
    for night, value in enumerate(values, start=1):
        launch = Launch(
            id=f"run-{night}",
            date=f"2025-03-{night:02}T02:00:00Z",
            values={"ttft_ms_p50": value},
            n={"ttft_ms_p50": 64},
            engine_version=f"0.{night}",
        )
        entry = HistoryEntry(
            key=key,
            workload="fixed-shapes",
            cell=cell,
            workload_digest="d",
            verdict=Verdict.FAIL if value > 150 else Verdict.PASS,
            launch=launch,
            launch_id=launch.id,
        )
        lines.append(to_line(entry))
    path = folder / f"{topology}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path
