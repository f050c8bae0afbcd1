"""A stand-in for an engine: speaks just enough of vLLM's API for the real router, and misbehaves on request.

Standard library only, so that it starts fast. Behaviour comes from FAKE_* variables, see `main`.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time


def say(text: str) -> None:
    print(text, flush=True)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model = "m"
    role = "server"
    engine_id = "e0"
    deaf = False

    def do_GET(self) -> None:
        if self.deaf or flag("DEAF"):
            time.sleep(60)
        if self.path == "/health":
            self._send(int(flag("HEALTH") or 200), b"")
        elif self.path == "/v1/models" and flag("MODELS"):
            self._send(200, flag("MODELS").encode(), "application/json")
        elif self.path == "/v1/models":
            if flag("DIE_AFTER_MODELS"):
                threading.Timer(float(flag("DIE_AFTER_MODELS")), lambda: os._exit(9)).start()
            self._json({"object": "list", "data": [{"id": self.model, "object": "model"}]})
        elif self.path == "/metrics":
            self._send(200, b"# TYPE fake_up gauge\nfake_up 1\n", "text/plain")
        else:
            self._send(404, b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
        say(
            f"POST {self.path} {json.dumps(body.get('kv_transfer_params'))} stream={bool(body.get('stream'))}"
        )
        if os.environ.get("FAKE_DIE_ON_REQUEST"):
            say("RuntimeError: the fake engine was told to die")
            os._exit(7)
        if os.environ.get("FAKE_HANG_ON_REQUEST"):
            time.sleep(60)
        if os.environ.get("FAKE_DRIP") and body.get("stream"):
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            while True:
                self.wfile.write(b": still here\n\n")
                time.sleep(0.2)
        id = "cmpl-" + self.headers.get("x-request-id", "none")
        if os.environ.get("FAKE_ERROR_IN_STREAM") and body.get("stream"):
            self._events([{"error": {"message": "Internal server error", "code": 500}}])
            return
        if flag("CUT"):
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            self.wfile.write(b"data: ")
            self.close_connection = True
            return
        if flag("REFUSE"):
            self._send(int(flag("REFUSE")), b"no room left")
            return
        n = int(body["max_tokens"]) - int(flag("SHORT") or 0)
        seed = sum(body["prompt"]) if isinstance(body["prompt"], list) else len(body["prompt"])
        tokens = [(seed * 31 + i * 7) % 1000 for i in range(n)]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": n}
        params = body.get("kv_transfer_params") or {}
        answer = None
        if params.get("do_remote_decode"):
            answer = {"do_remote_prefill": True, "remote_engine_id": self.engine_id, "remote_block_ids": [1]}
        if body.get("stream"):
            events: list[dict[str, object]] = [
                {"id": id, "choices": [{"index": 0, "text": f" {t}", "token_ids": [t]}]} for t in tokens
            ]
            events.append({"id": id, "choices": [], "usage": usage})
            self._events(events)
        else:
            choice = {"index": 0, "text": "x", "token_ids": tokens, "finish_reason": "length"}
            self._json({"id": id, "choices": [choice], "usage": usage, "kv_transfer_params": answer})

    def _events(self, events: list[dict[str, object]]) -> None:
        text = "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"
        self._send(200, text.encode(), "text/event-stream")

    def _json(self, data: object) -> None:
        self._send(200, json.dumps(data).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def flag(name: str) -> str:
    return os.environ.get(f"FAKE_{name}", "")


def main() -> None:
    """Arguments: id host port model role.

    Variables: FAKE_IGNORE_TERM, FAKE_SETSID_PORT, FAKE_DOUBLE_FORK, FAKE_NAMELESS_CHILD, FAKE_DIE (exit code),
    FAKE_DIE_AFTER (seconds), FAKE_PRINT_FOREVER, FAKE_QUIET, FAKE_NEVER_READY, FAKE_SELF_KILL, FAKE_STARTUP (seconds),
    FAKE_SAY (a line), FAKE_WRONG_MODEL, FAKE_DIE_ON_REQUEST, FAKE_HANG_ON_REQUEST, FAKE_DRIP, FAKE_ERROR_IN_STREAM,
    FAKE_EXIT (code, without a word), FAKE_SIGNAL (sent to itself), FAKE_BYTES (garbage before a death), FAKE_DEAF,
    FAKE_HEALTH (status), FAKE_MODELS (body), FAKE_CUT, FAKE_REFUSE (status), FAKE_SHORT (tokens too few).
    FAKE_DIE_AFTER_MODELS (seconds after it first listed its models). SIGUSR1 makes it deaf: it lives
    and answers no more.
    """
    id, host, port, model, role = sys.argv[1:6]
    if flag("IGNORE_TERM"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not flag("QUIET"):
        say(f"fake engine {id} starts")
        say("Loading weights from nowhere")
    if flag("SAY"):
        say(flag("SAY"))
    if flag("SETSID_PORT"):
        holder = (
            "import signal, socket, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            "s = socket.socket(); s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); time.sleep(600)"
        )
        subprocess.Popen([sys.executable, "-c", holder, flag("SETSID_PORT")], start_new_session=True)
    if flag("DOUBLE_FORK"):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.execve("/bin/sleep", ["sleep", "600"], {})
            os._exit(0)
        os.wait()
    if flag("NAMELESS_CHILD"):
        # what setproctitle does to the environment of an engine core, seen from /proc
        subprocess.Popen(["/bin/sleep", "600"], env={})
    if flag("STARTUP"):
        time.sleep(float(flag("STARTUP")))
    if flag("BYTES"):
        sys.stdout.buffer.write(b"\xff\xfe\x00garbage" * 20_000 + b"\n")
        sys.stdout.flush()
    if flag("SIGNAL"):
        os.kill(os.getpid(), int(flag("SIGNAL")))
    if flag("EXIT"):
        os._exit(int(flag("EXIT")))
    if flag("SELF_KILL"):
        os.kill(os.getpid(), signal.SIGKILL)
    if flag("DIE"):
        say("Traceback (most recent call last):")
        say('  File "fake.py", line 1, in <module>')
        say("ValueError: max_model_len 999 is too large")
        sys.exit(int(flag("DIE")))
    if flag("PRINT_FOREVER"):

        def shout() -> None:
            while True:
                say("x" * 200)

        threading.Thread(target=shout, daemon=True).start()
    if flag("NEVER_READY"):
        time.sleep(600)
    Handler.model = "another" if flag("WRONG_MODEL") else model
    Handler.role, Handler.engine_id = role, id
    signal.signal(signal.SIGUSR1, lambda *_: setattr(Handler, "deaf", True))
    if flag("DIE_AFTER"):
        threading.Timer(float(flag("DIE_AFTER")), lambda: os._exit(9)).start()
    http.server.ThreadingHTTPServer.address_family = socket.AF_INET
    server = http.server.ThreadingHTTPServer((host, int(port)), Handler)
    if not flag("QUIET"):
        say(f"Starting vLLM server on http://{host}:{port}")
    server.serve_forever()


if __name__ == "__main__":
    main()
