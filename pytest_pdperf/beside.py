"""Another tool on the very same stack, minutes after us: the only fair way of comparing its numbers with ours."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .engines.base import Programs
from .errors import UsageProblem
from .report.exchange.beside import rows
from .report.exchange.detect import import_file
from .report.exchange.imported import ImportedResult
from .report.outcomes import CellOutcome
from .spec.workload import Cell, ClosedLoop

AGREE = 0.03
"""Largest relative difference between two tools' values of the same definition."""
HELD = frozenset(
    {"tpot_ms_p50", "tpot_ms_mean", "itl_ms_p50", "itl_ms_mean", "e2e_ms_p50", "e2e_ms_mean"}
) | {
    "output_tps_wall",
    "request_rate",
}
"""What has to agree. Tails of few requests are chance, and a TTFT holds the lateness of the client that stamps it: both
are shown, not held."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A benchmark program and how it is told a cell's load."""

    name: str
    program: str
    """Looked up like engines are: `--engine-env` first, then PATH."""
    arguments: Callable[[Load], list[str]]
    out: str
    """Name of the result file below the folder that it is given."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the tool is to send."""

    url: str
    served_model: str
    tokenizer: str
    input_tokens: int
    output_tokens: int
    concurrency: int
    requests: int
    warmups: int
    seed: int
    folder: Path


def _vllm(load: Load) -> list[str]:
    return [
        *("bench", "serve", "--backend", "openai", "--base-url", load.url, "--endpoint", "/v1/completions"),
        *("--model", load.served_model, "--tokenizer", load.tokenizer, "--dataset-name", "random"),
        *("--random-input-len", str(load.input_tokens), "--random-output-len", str(load.output_tokens)),
        *("--random-range-ratio", "0", "--num-prompts", str(load.requests), "--ignore-eos", "--disable-tqdm"),
        *("--max-concurrency", str(load.concurrency), "--num-warmups", str(load.warmups)),
        *("--seed", str(load.seed), "--percentile-metrics", "ttft,tpot,itl,e2el"),
        *("--metric-percentiles", "50,95,99", "--save-result", "--save-detailed"),
        *("--result-dir", str(load.folder), "--result-filename", "vllm.json"),
    ]


def _sglang(load: Load) -> list[str]:
    return [
        *("--backend", "sglang-oai", "--base-url", load.url, "--model", load.served_model),
        *("--tokenizer", load.tokenizer, "--dataset-name", "random-ids", "--random-range-ratio", "1"),
        *("--random-input-len", str(load.input_tokens), "--random-output-len", str(load.output_tokens)),
        *("--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency)),
        *("--warmup-requests", str(load.warmups), "--seed", str(load.seed), "--disable-tqdm"),
        *("--output-details", "--output-file", str(load.folder / "sglang.jsonl")),
    ]


TOOLS: Mapping[str, Tool] = {
    "vllm": Tool("vllm bench serve", "vllm", _vllm, "vllm.json"),
    "sglang": Tool("sglang.bench_serving", "sglang.bench_serving", _sglang, "sglang.jsonl"),
}
"""Engine family -> the benchmark that comes with it."""


def load_of(cell: Cell, *, url: str, served_model: str, tokenizer: str, seed: int, folder: Path) -> Load:
    """The cell's load in the words of other tools. Raises UsageProblem for one that they cannot send."""
    stream = cell.main
    if len(cell.streams) > 1 or not isinstance(stream.arrival, ClosedLoop) or stream.arrival.think_s:
        raise UsageProblem(f"{cell.id}: other tools are only compared on closed loops without pauses")
    if stream.input_tokens[0] != stream.input_tokens[1]:
        raise UsageProblem(f"{cell.id}: other tools are only compared on prompts of one length")
    return Load(
        url=url,
        served_model=served_model,
        tokenizer=tokenizer,
        input_tokens=stream.input_tokens[0],
        output_tokens=stream.output_tokens,
        concurrency=stream.arrival.concurrency,
        requests=stream.requests,
        warmups=cell.warmups,
        seed=seed,
        folder=folder,
    )


def find(engine: str, programs: Programs) -> tuple[Tool, Path] | str:
    """The tool that comes with an engine and where it is, or why there is none."""
    tool = TOOLS.get(engine.removeprefix("sim-") if engine != "sim" else "vllm")
    if tool is None:
        return f"no benchmark program is known for engine {engine}"
    found = programs.find(tool.program)
    return (tool, found) if found is not None else f"{tool.program} is not installed; name its --engine-env"


def run(tool: Tool, program: Path, load: Load, *, timeout_s: float) -> ImportedResult:
    """Let the tool send the load and read what it wrote. Raises UsageProblem with the end of its output."""
    load.folder.mkdir(parents=True, exist_ok=True)
    log = load.folder / "output.log"
    command = [str(program), *tool.arguments(load)]
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=timeout_s,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise UsageProblem(f"{tool.name} took longer than {timeout_s:.0f} s; its output: {log}") from None
    if code or not (load.folder / tool.out).is_file():
        last = log.read_text(errors="replace").strip().splitlines()[-8:]
        raise UsageProblem("\n".join([f"{tool.name} ended with {code}; its output: {log}", *last]))
    (result,) = import_file(load.folder / tool.out)
    return result


def agreement(
    result: ImportedResult, *outcomes: CellOutcome, limit: float = AGREE
) -> tuple[list[str], list[str]]:
    """Lines with both values of each metric of the same definition, and those of HELD that are `limit` apart.

    `outcomes` are ours, measured before and perhaps after the tool: a load whose own two values differ holds the tool
    to no more than what lies between them.
    """
    lines, apart = [], []
    for row in rows(result, outcomes):
        changes = [ours.change for ours in row.ours if ours.change is not None]
        if not row.same or len(changes) < len(outcomes):
            continue
        here = " and ".join(f"{ours.value:.4g}" for ours in row.ours)
        line = (
            f"{row.metric}: {row.theirs.value:.4g} {row.theirs.unit} by {result.tool}, {here} here "
            f"({' and '.join(f'{change:+.1%}' for change in changes)})"
        )
        lines.append(line)
        if row.metric in HELD and (min(changes) > limit or max(changes) < -limit):
            apart.append(line)
    return lines, apart


def shown(folder: Path) -> Sequence[str]:
    """What the comparisons of a run said, for the end of the terminal's output."""
    return [line for path in sorted(folder.glob("*.txt")) for line in path.read_text().splitlines()]
