"""Adding an engine takes one file: this one holds a toy engine, its server process, and the contract it passes.

    python test_contract_toy.py PORT MODEL        is the server

It serves with threads of the standard library: one token is one hash, no metrics, no disaggregation.
"""

from __future__ import annotations

import http.server
import json
import signal
import sys
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

if __name__ != "__main__":  # the server process wants none of this
    import pytest

    from pytest_pdperf.engines.base import Command, Instance, Programs
    from pytest_pdperf.routers.registry import get_router
    from pytest_pdperf.spec.topology import Kind, Topology
    from tests.integration.engine_contract import Case, EngineContract

    HERE = Programs((Path(sys.executable).parent,))

    class ToyEngine:
        name = "toy"
        default_router = "vllm_router"
        simulated = True

        def check(self, programs: Programs, topology: Topology, devices: Sequence[str]) -> None:
            pass

        def command(self, instance: Instance, programs: Programs) -> Command:
            argv = (sys.executable, __file__, str(instance.ports.http), instance.served_model)
            return Command(argv, dict(instance.env))

        def stage(self, line: str) -> str | None:
            return "serving" if "listening" in line else None

        def root_cause(self, lines: Sequence[str]) -> str | None:
            return next((line for line in lines if "Error" in line), None)

        def version(self, programs: Programs) -> str:
            return "1"

        def longest_context(self, model: str) -> int | None:
            return None

        def supported_prompts(self) -> frozenset[str]:
            return frozenset({"token_ids"})

    class TestToy(EngineContract):
        @pytest.fixture(scope="class")
        @classmethod
        def case(cls) -> Case:
            if HERE.find("vllm-router") is None:
                pytest.skip("needs vllm-router (extra `routers`)")
            router = get_router("vllm_router")
            return Case(ToyEngine(), router, Kind.AGGREGATED, HERE, context=4096, measured=False)


class Handler(http.server.BaseHTTPRequestHandler):
    """Health, the list of models, and greedy completions of token-id prompts."""

    protocol_version = "HTTP/1.1"
    model = ""
    context = 4096

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": self.model, "object": "model"}]})
        else:
            self.answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt, n = body["prompt"], body["max_tokens"]
        if len(prompt) + n > self.context:
            self.answer(400, {"error": {"message": "too long"}})
            return
        tokens = [zlib.crc32(repr((prompt, i)).encode()) % 30000 for i in range(n)]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": n, "total_tokens": len(prompt) + n}
        if not body.get("stream"):
            choice = self.choice(tokens, "length")
            self.answer(200, {"id": "toy", "choices": [choice], "usage": usage})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for i, token in enumerate(tokens):
            self.event({"id": "toy", "choices": [self.choice([token], "length" if i + 1 == n else None)]})
        self.event({"id": "toy", "choices": [], "usage": usage})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def choice(self, tokens: list[int], finish: str | None) -> dict[str, object]:
        text = "".join(f" t{token}" for token in tokens)
        return {"index": 0, "text": text, "token_ids": tokens, "finish_reason": finish}

    def event(self, data: dict[str, object]) -> None:
        self.chunk(b"data: " + json.dumps(data).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def answer(self, status: int, data: dict[str, object]) -> None:
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def serve(port: int, model: str) -> None:
    Handler.model = model
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print("listening", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
