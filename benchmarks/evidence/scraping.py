"""What looking at the engines costs while a cell runs: CPU of one sample of eight roles, in one second.

    python -m benchmarks.evidence            eight pages of the size that vLLM prints
    python -m benchmarks.evidence --page metrics.prom

A server process of its own hands out the pages, so that only reading them is counted. `look` is what waits for engines
to be idle (the gauges only), `whole` what is read before and after a cell, `library` what prometheus_client's parser
alone takes for the same pages.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pytest_pdperf.evidence.exposition import Snapshot
from pytest_pdperf.evidence.readings import LOOKS
from pytest_pdperf.evidence.scrape import Scraper

ROLES = 8
BOUNDS = (
    *("0.001", "0.005", "0.01", "0.02", "0.04", "0.06", "0.08", "0.1", "0.25", "0.5", "0.75", "1.0", "2.5"),
    *("5.0", "7.5", "10.0", "20.0", "40.0", "80.0", "160.0", "640.0", "2560.0", "+Inf"),
)


def page(histograms: int = 26, counters: int = 60) -> bytes:
    """A page like vLLM's: 0.05 MB, most of it buckets; the gauges of a look are on it."""
    labels = 'engine="0",model_name="Qwen/Qwen3-32B"'
    lines = [
        *("# TYPE vllm:num_requests_running gauge", f"vllm:num_requests_running{{{labels}}} 3.0"),
        *("# TYPE vllm:num_requests_waiting gauge", f"vllm:num_requests_waiting{{{labels}}} 0.0"),
        *("# TYPE vllm:kv_cache_usage_perc gauge", f"vllm:kv_cache_usage_perc{{{labels}}} 0.25"),
        *(
            "# TYPE vllm:cache_config_info gauge",
            'vllm:cache_config_info{engine="0",num_gpu_blocks="17873"} 1.0',
        ),
    ]
    for number in range(histograms):
        name = f"vllm:histogram_{number}_seconds"
        lines += [f"# HELP {name} Histogram number {number}, in seconds.", f"# TYPE {name} histogram"]
        lines += [f'{name}_bucket{{{labels},le="{le}"}} {17 * number}.0' for le in BOUNDS]
        lines += [f"{name}_count{{{labels}}} 1234.0", f"{name}_sum{{{labels}}} 12.345678"]
    for number in range(counters):
        name = f"vllm:counter_{number}_total"
        lines += [
            f"# HELP {name} Counter number {number}.",
            f"# TYPE {name} counter",
            f"{name}{{{labels}}} {number}.0",
        ]
    return ("\n".join(lines) + "\n").encode()


def _serve(body: bytes, ends: Connection) -> None:
    class Pages(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    ends.send(server.server_address[1])
    server.serve_forever()


def cpu_ms(work: Callable[[], object], times: int) -> float:
    """CPU time of this process per call, all its threads together."""
    work()
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times * 1000.0


def measure(body: bytes, times: int = 60) -> dict[str, float]:
    """CPU in ms of one sample of all roles: `look`, `whole`, and what the library's parser alone takes for it."""
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=_serve, args=(body, theirs), daemon=True)
    server.start()
    try:
        url = f"http://127.0.0.1:{ours.recv()}"
        urls = {f"role-{i}": url for i in range(ROLES)}
        with ExitStack() as exits:
            scraper = exits.enter_context(Scraper(urls))
            bad = [found for found in scraper.read().values() if not isinstance(found, Snapshot)]
            if bad:
                raise SystemExit(f"not a page: {bad[0]}")
            text = body.decode()
            return {
                "look": cpu_ms(lambda: scraper.read(only=LOOKS), times),
                "whole": cpu_ms(scraper.read, times),
                "library": ROLES
                * cpu_ms(lambda: list(text_string_to_metric_families(text)), max(3, times // 10)),
            }
    finally:
        server.terminate()
        server.join()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="benchmarks.evidence")
    parser.add_argument("--page", type=Path, help="a metrics page to hand out (default: made up, 0.07 MB)")
    parser.add_argument("--times", type=int, default=60)
    options = parser.parse_args(argv)
    body = options.page.read_bytes() if options.page else page()
    found = measure(body, options.times)
    print(f"{ROLES} roles, pages of {len(body)} bytes, {len(body.splitlines())} lines")
    for name, value in found.items():
        print(f"{name:8} {value:7.2f} ms CPU a sample = {value / 10:5.2f} % of a core at one a second")
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
