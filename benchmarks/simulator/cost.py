"""What a simulated engine costs and how true it keeps its model's time: `python -m benchmarks.simulator.cost`.

One engine of the `fast` profile, N streams at once, a bare client. CPU is the server process's own (kernel included);
"model" is the mean step of its own histogram in model time, "client" the mean gap that the client saw.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import httpx
import orjson
import psutil
from prometheus_client.parser import text_string_to_metric_families

MODEL = "m"
INPUT_TOKENS = 256


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Poll /health; RuntimeError when the process ends or takes a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise RuntimeError("the simulated engine did not come up")


def inter_token(url: str) -> tuple[float, float]:
    """Sum (seconds of model time) and count of the engine's inter-token histogram."""
    page = httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    name = "vllm:inter_token_latency_seconds"
    return values[f"{name}_sum"], values[f"{name}_count"]


async def stream(port: int, output: int, seed: int) -> tuple[float, float]:
    """Moments of the first and the last token event of one request."""
    numbers = random.Random(seed)
    prompt = [numbers.randrange(150_000) for _ in range(INPUT_TOKENS)]
    body = orjson.dumps(
        {"model": MODEL, "prompt": prompt, "max_tokens": output, "stream": True, "ignore_eos": True}
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    first = last = 0.0
    events = 0
    while data := await reader.read(1 << 16):
        if count := data.count(b"data: {"):
            last = time.monotonic()
            first = first or last
            events += count
    writer.close()
    if events != output:
        raise RuntimeError(f"{events} token events instead of {output}")
    return first, last


async def streams(port: int, concurrency: int, output: int) -> float:
    """Mean gap between tokens of `concurrency` simultaneous streams, in seconds."""
    spans = await asyncio.gather(*(stream(port, output, seed) for seed in range(concurrency)))
    return sum(last - first for first, last in spans) / concurrency / (output - 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line a concurrency."""
    import uvloop

    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator.cost", description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--output-tokens", type=int, default=512)
    options = parser.parse_args(argv)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "pytest_pdperf.engines.sim.server", "--role", "server"]
    command += ["--port", str(port), "--served-model-name", MODEL]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_ready(process, url)
        server = psutil.Process(process.pid)
        print(f"{'streams':>7} {'tokens':>8} {'CPU us/token':>13} {'model ms':>9} {'client ms':>10}")
        for concurrency in options.concurrency:
            before, model_before = server.cpu_times(), inter_token(url)
            client = uvloop.run(streams(port, concurrency, options.output_tokens))
            after, model_after = server.cpu_times(), inter_token(url)
            tokens = concurrency * options.output_tokens
            cpu = after.user + after.system - before.user - before.system
            model = (model_after[0] - model_before[0]) / (model_after[1] - model_before[1])
            print(
                f"{concurrency:>7} {tokens:>8} {1e6 * cpu / tokens:>13.1f} {1e3 * model:>9.3f} {1e3 * client:>10.3f}"
            )
    finally:
        process.terminate()
        process.wait(15)
    return 0


if __name__ == "__main__":
    sys.exit(main())
