"""Whole benchmark programs as clients under test, each from an environment of its own (`environments`).

They report durations, not moments, so only TTFT and gaps are compared, request by request: vllm and aiperf tell the id
that they sent, the others keep the texts, and the null server's first token names the request. Run as their manuals
say, with warm-ups left to their defaults.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.client.environments import reason
from benchmarks.client.load import MODEL, Load, Report

RUN_S = 300.0
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
            MODEL,
        ),
        *("--tokenizer", tokenizer, "--dataset-name", "random", *sizes, "--num-prompts", str(load.requests)),
        *("--max-concurrency", str(load.streams), "--ignore-eos"),
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
    return [
        *(str(env / "bin" / "aiperf"), "profile", "--url", url, "--model", MODEL, "--tokenizer", tokenizer),
        *("--endpoint-type", "completions", "--streaming", "--ui", "none", "--artifact-dir", str(out)),
        *("--concurrency", str(load.streams), "--request-count", str(load.requests)),
        *("--isl", str(load.prompt_tokens), "--osl", str(load.tokens), "--export-level", "records"),
        *("--extra-inputs", "ignore_eos:true"),
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


def sglang_command(env: Path, url: str, load: Load, tokenizer: str, out: Path) -> list[str]:
    """`sglang.bench_serving` on the completions route, with prompts of random ids."""
    return [
        *(str(env / "bin" / "python"), "-m", "sglang.bench_serving", "--backend", "sglang-oai"),
        *("--base-url", url, "--model", MODEL, "--tokenizer", tokenizer, "--dataset-name", "random-ids"),
        *("--random-input-len", str(load.prompt_tokens), "--random-output-len", str(load.tokens)),
        *("--random-range-ratio", "1.0", "--num-prompts", str(load.requests)),
        *("--max-concurrency", str(load.streams), "--disable-tqdm"),
        *("--output-file", str(out / "sglang.jsonl"), "--output-details"),
    ]


def sglang_report(out: Path, cpu_s: float) -> Report:
    """Its details: lists in the order of the prompts, with the text of each answer."""
    data = json.loads((out / "sglang.jsonl").read_text().splitlines()[-1])
    names = [number(text) for text in data["generated_texts"]]
    return Report(
        {},
        cpu_s,
        [],
        ttft_ms={name: 1e3 * value for name, value in zip(names, data["ttfts"], strict=True)},
        gaps_ms={name: [1e3 * g for g in gaps] for name, gaps in zip(names, data["itls"], strict=True)},
    )


def guidellm_command(env: Path, url: str, load: Load, tokenizer: str, out: Path) -> list[str]:
    """`guidellm run` with as many streams as clients."""
    return [
        *(str(env / "bin" / "guidellm"), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={url},model={MODEL},request_format=/v1/completions"),
        *("--profile", f"kind=concurrent,streams={load.streams}"),
        *("--constraint", f"kind=max_requests,count={load.requests}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={load.prompt_tokens},output_tokens={load.tokens}"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        *("--output", f"kind=json,path={out / 'guidellm.json'}"),
    ]


def guidellm_report(out: Path, cpu_s: float) -> Report:
    """Its per-request statistics: TTFT, and of the gaps a request's mean only, which says nothing of their spread."""
    data = json.loads((out / "guidellm.json").read_text())
    done = data["benchmarks"][0]["requests"]["successful"]
    return Report({}, cpu_s, [], ttft_ms={number(r["output"]): r["time_to_first_token_ms"] for r in done})


def number(text: str) -> str:
    """Name of a request from the text of its answer: the null server's first token says it."""
    return text.strip().partition(" ")[0]


TOOLS: Mapping[str, tuple[Command, Callable[[Path, float], Report]]] = {
    "vllm": (vllm_command, vllm_report),
    "sglang": (sglang_command, sglang_report),
    "aiperf": (aiperf_command, aiperf_report),
    "guidellm": (guidellm_command, guidellm_report),
}
TITLES: Mapping[str, str] = {
    "vllm": "vllm bench serve",
    "sglang": "sglang.bench_serving",
    "aiperf": "aiperf",
    "guidellm": "guidellm",
}
ENVIRONMENT: Mapping[str, str] = {
    "GUIDELLM__MAX_WORKER_PROCESSES": "1",  # it has one core; ten processes on it take a minute to start
}


class ToolFailed(Exception):
    """A program did not run to its end; the message has the end of its log."""


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
                timeout=RUN_S,
                check=False,
                env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | dict(ENVIRONMENT),
            )
    except subprocess.TimeoutExpired:
        raise ToolFailed(f"did not end within {RUN_S:.0f} s") from None
    finally:
        os.sched_setaffinity(0, mine)
    if done.returncode:
        said = (out / "log").read_text(errors="replace")
        raise ToolFailed(f"exit status {done.returncode}: {reason(said)}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return report(out, cpu)
