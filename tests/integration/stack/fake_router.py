"""A router that is healthy too early. Arguments: host port; FAKE_READINESS is a JSON list of answers, one a poll.

An answer with `http` has that status, one with `raw` is that text, one with `end` ends the process with that code.
"""

from __future__ import annotations

import http.server
import json
import os
import sys

ANSWERS = json.loads(os.environ["FAKE_READINESS"])


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, {})
            return
        answer = ANSWERS.pop(0) if len(ANSWERS) > 1 else ANSWERS[0]
        print(f"readiness {answer}", flush=True)
        if "end" in answer:
            print("error: no such policy", flush=True)
            os._exit(answer["end"])
        if "raw" in answer:
            self._raw(200, answer["raw"].encode(), "text/html")
            return
        self._send(answer.get("http", 200), answer)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
        print("POST", flush=True)
        if os.environ.get("FAKE_REFUSE"):
            self._send(500, {"error": "no worker"})
            return
        usage = {"completion_tokens": body["max_tokens"]}
        choice = {"index": 0, "text": "x", "token_ids": list(range(body["max_tokens"]))}
        text = (
            f"data: {json.dumps({'id': 'cmpl-1', 'choices': [choice], 'usage': usage})}\n\ndata: [DONE]\n\n"
        )
        self._raw(200, text.encode(), "text/event-stream")

    def _send(self, status: int, data: object) -> None:
        self._raw(status, json.dumps(data).encode(), "application/json")

    def _raw(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
