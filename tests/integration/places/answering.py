"""Small servers that answer as they are told, for what a deployment may turn out to be."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

Body = str | Mapping[str, object]
Answer = tuple[int, Body]


@dataclass
class Answering:
    """A server on loopback: path -> (status, text or JSON)."""

    url: str
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Authorization header of every request."""


@contextmanager
def answering(answers: Mapping[str, Answer], key: str = "") -> Iterator[Answering]:
    """Serves while inside. With `key` everything else than `Bearer key` is answered with 401."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.answer()

        def answer(self) -> None:
            given = self.headers.get("authorization")
            server.seen.append((self.path, given))
            status, body = answers.get(self.path, (404, "not here"))
            if key and given != f"Bearer {key}":
                status, body = 401, f"no: {given}"
            text = body if isinstance(body, str) else json.dumps(body)
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("location", text)
            self.send_header("content-type", "text/html" if isinstance(body, str) else "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = Answering(f"http://127.0.0.1:{listener.server_address[1]}")
    thread = threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join(10)


def models(*names: str, **more: object) -> Answer:
    """A list of models."""
    return 200, {"object": "list", "data": [{"id": name, "object": "model", **more} for name in names]}


VLLM_PAGE: Answer = (
    200,
    '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 0\n',
)
SGLANG_PAGE: Answer = (
    200,
    '# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{engine_type="unified"} 0\n',
)
