"""Whole benchmark programs as clients under test, from environments of their own (`--tool NAME=ENVIRONMENT`).

They report durations, not moments, so only TTFT and ITL are compared - request by request, because each can tell which
request id its numbers belong to. Run as their manuals say, with warm-ups left to their defaults.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.client.load import Load, Report

Command = Callable[[Path, str, Load, str, Path], list[str]]


def vllm_command(env: Path, url: str, load: Load, tokenizer: str, out: Path) -> list[str]:
    """`vllm bench serve` on the completions route."""
    sizes = ["--random-input-len", str(load.prompt_tokens), "--random-output-len", str(load.tokens)]
    return [
        *(
            str(env / "bin" / "vllm"),
            "bench",
            "serve",
            "--backend",
            "openai",
            "--base-url",
            url,
            "--model",
            "null",
        ),
        *("--tokenizer", tokenizer, "--dataset-name", "random", *sizes, "--num-prompts", str(load.requests)),
        *("--max-concurrency", str(load.streams), "--ignore-eos", "--extra-body", json.dumps(load.pace)),
        *("--request-id-prefix", "vllm-", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(out), "--result-filename", "vllm.json"),
    ]


def vllm_report(out: Path, cpu_s: float) -> Report:
    """Its detailed result: lists in the order of the request numbers."""
    data = json.loads((out / "vllm.json").read_text())
    names = [f"vllm-{i}" for i in range(len(data["ttfts"]))]
    return Report(
        {},
        cpu_s,
        [],
        ttft_ms={name: 1e3 * value for name, value in zip(names, data["ttfts"], strict=True)},
        gaps_ms={name: [1e3 * g for g in gaps] for name, gaps in zip(names, data["itls"], strict=True)},
    )


def aiperf_command(env: Path, url: str, load: Load, tokenizer: str, out: Path) -> list[str]:
    """`aiperf profile` on the completions route."""
    extra = [f"{name}:{value}" for name, value in load.pace.items()]
    return [
        *(str(env / "bin" / "aiperf"), "profile", "--url", url, "--model", "null", "--tokenizer", tokenizer),
        *("--endpoint-type", "completions", "--streaming", "--ui", "none", "--artifact-dir", str(out)),
        *("--concurrency", str(load.streams), "--request-count", str(load.requests)),
        *("--isl", str(load.prompt_tokens), "--osl", str(load.tokens), "--export-level", "records"),
        *(part for item in (*extra, "ignore_eos:true") for part in ("--extra-inputs", item)),
    ]


def aiperf_report(out: Path, cpu_s: float) -> Report:
    """Its per-record export."""
    ttft, gaps = {}, {}
    for line in (out / "profile_export.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["metadata"]["benchmark_phase"] != "profiling" or row.get("error"):
            continue
        name, metrics = row["metadata"]["x_request_id"], row["metrics"]
        ttft[name] = float(metrics["time_to_first_token"]["value"])
        gaps[name] = [float(g) for g in metrics["inter_chunk_latency"]["value"]]
    return Report({}, cpu_s, [], ttft_ms=ttft, gaps_ms=gaps)


TOOLS: Mapping[str, tuple[Command, Callable[[Path, float], Report]]] = {
    "vllm": (vllm_command, vllm_report),
    "aiperf": (aiperf_command, aiperf_report),
}


def run_tool(name: str, env: Path, url: str, load: Load, tokenizer: str, out: Path, core: int) -> Report:
    """Run a program on one core; its report with the CPU time of its whole process tree.

    CPU time includes start-up, which a program of many imports spends most on; read it for long runs only.
    """
    command, report = TOOLS[name]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        with (out / "log").open("wb") as log:
            done = subprocess.run(
                command(env, url, load, tokenizer, out),
                cwd=out,
                stdout=log,
                stderr=log,
                timeout=600,
                check=False,
            )
    finally:
        os.sched_setaffinity(0, mine)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{(out / 'log').read_text()[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return report(out, cpu)
