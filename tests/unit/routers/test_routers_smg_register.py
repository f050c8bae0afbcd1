"""What smg is told about each worker, and that a worker it cannot be told about ends it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pytest_pdperf.routers import smg_register
from pytest_pdperf.routers.smg_register import RegisterError, fetch, register, registration, runtime_of

P, D, R = "http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:9"
SGLANG = {"/server_info": {"disaggregation_mode": "prefill"}}
VLLM = {"/version": {"version": "0.32.0"}}
MOONCAKE = {"http://127.0.0.1:8998/query": {"0": {"engine_id": "e-1", "worker_addr": {}}}}


class Answers:
    """Says what it was told for each URL or path, and remembers what was posted."""

    def __init__(self, *tables: Mapping[str, Any]) -> None:
        self.table = {key: value for table in tables for key, value in table.items()}
        self.posted: list[tuple[str, Mapping[str, object]]] = []

    def __call__(self, url: str, body: Mapping[str, object] | None = None) -> Any:
        if body is not None:
            self.posted.append((url, body))
            return {}
        return self.table.get(url) or self.table.get("/" + url.rpartition("/")[2])


@pytest.mark.parametrize(
    ("tables", "want"), [([SGLANG], "sglang"), ([VLLM], "vllm"), ([SGLANG, VLLM], "sglang")]
)
def test_a_worker_is_known_by_its_routes(tables: list[Mapping[str, Any]], want: str) -> None:
    assert runtime_of(P, Answers(*tables)) == want


@pytest.mark.parametrize(
    "table", [{}, {"/server_info": []}, {"/version": {"v": 1}}, {"/server_info": {"a": 1}}]
)
def test_neither_is_an_error(table: Mapping[str, Any]) -> None:
    with pytest.raises(RegisterError, match=f"{P} answers neither"):
        runtime_of(P, Answers(table))


@pytest.mark.parametrize(
    ("tables", "role", "connector", "want"),
    [
        ([SGLANG], "prefill", "nixl", {"runtime_type": "sglang", "bootstrap_port": 8998}),
        ([SGLANG], "prefill", "mooncake", {"runtime_type": "sglang", "bootstrap_port": 8998}),
        ([SGLANG], "decode", "nixl", {"runtime_type": "sglang"}),
        ([VLLM], "prefill", "nixl", {"runtime_type": "vllm", "kv_connector": "NixlConnector"}),
        ([VLLM], "decode", "nixl", {"runtime_type": "vllm", "kv_connector": "NixlConnector"}),
        (
            [VLLM, MOONCAKE],
            "prefill",
            "mooncake",
            {
                "runtime_type": "vllm",
                "kv_connector": "MooncakeConnector",
                "bootstrap_port": 8998,
                "kv_engine_id": "e-1",
            },
        ),
        ([VLLM], "decode", "mooncake", {"runtime_type": "vllm", "kv_connector": "MooncakeConnector"}),
        ([VLLM], "prefill", "example", {"runtime_type": "vllm"}),
    ],
)
def test_what_smg_is_told(
    tables: list[Mapping[str, Any]], role: str, connector: str, want: dict[str, object]
) -> None:
    got = registration(P, role, 8998 if role == "prefill" else 0, connector, Answers(*tables))
    assert got == {"url": P, "worker_type": role} | want


@pytest.mark.parametrize("answer", [None, {}, {"0": {}}, []])
def test_a_mooncake_engine_without_an_id_is_an_error(answer: object) -> None:
    table = VLLM | {"http://127.0.0.1:8998/query": answer}
    with pytest.raises(RegisterError, match=r"no engine id .* 127\.0\.0\.1:8998"):
        registration(P, "prefill", 8998, "mooncake", Answers(table))


def test_workers_are_registered_in_order() -> None:
    answers = Answers(VLLM)
    lines = register(R, [(P, "prefill", 8998), (D, "decode", 0)], "nixl", 5.0, answers)
    assert [(url, body["url"], body["worker_type"]) for url, body in answers.posted] == [
        (f"{R}/workers", P, "prefill"),
        (f"{R}/workers", D, "decode"),
    ]
    assert "kv_connector=NixlConnector" in lines[0]


def test_a_router_that_is_not_up_yet_is_waited_for_and_then_given_up() -> None:
    calls = 0

    def ask(url: str, body: Mapping[str, object] | None = None) -> Any:
        nonlocal calls
        if body is None:
            return {"version": "1"}
        calls += 1
        return {} if calls == 3 else None

    assert len(register(R, [(P, "decode", 0)], "nixl", 30.0, ask)) == 1
    assert calls == 3

    def silent(url: str, body: Mapping[str, object] | None = None) -> Any:
        return {"version": "1"} if body is None else None

    with pytest.raises(RegisterError, match=f"{R}/workers took no worker within 0 s"):
        register(R, [(P, "decode", 0)], "nixl", 0.0, silent)


class Server:
    """A few canned answers over real HTTP."""

    def __init__(self) -> None:
        table = {
            "/ok": (200, b'{"a": 1}'),
            "/bad": (200, b"no json"),
            "/known": (409, b"{}"),
            "/no": (422, b"why"),
        }

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = table.get(self.path, (404, b"{}"))
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.do_GET()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed_port()}")
    server = Server()
    yield server
    server.server.shutdown()
    server.server.server_close()


def test_fetch_goes_past_proxies_and_tells_a_refusal_from_silence(server: Server) -> None:
    assert fetch(f"{server.url}/ok") == {"a": 1}
    assert fetch(f"{server.url}/bad") is None
    assert fetch(f"{server.url}/missing") is None
    assert fetch(f"http://127.0.0.1:{closed_port()}/x", {}) is None
    assert fetch(f"{server.url}/known", {"url": "u"}) == {}
    with pytest.raises(RegisterError, match=r'/no refused \{"url": "u"\}: HTTP 422 why'):
        fetch(f"{server.url}/no", {"url": "u"})


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_a_worker_that_cannot_be_registered_ends_smg_with_the_reason() -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    argv = [sys.executable, "-m", smg_register.__name__, "--router", R, "--connector", "nixl"]
    worker = f"http://127.0.0.1:{closed_port()}"
    argv += ["--decode", worker, "--", *sleeper]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=50)
    assert done.returncode == -signal.SIGKILL
    assert f"error: pdperf: {worker} answers neither" in done.stderr


def test_the_process_becomes_the_program_after_the_dashes() -> None:
    show = [sys.executable, "-c", "import os; print(os.getpid())"]
    argv = [sys.executable, "-m", smg_register.__name__, "--router", R, "--connector", "nixl", "--", *show]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate(timeout=50)
    assert int(out.split()[0]) == process.pid
    assert process.returncode == 0


def test_without_a_program_to_become_it_says_so() -> None:
    with pytest.raises(SystemExit):
        smg_register.main(["--router", R, "--connector", "nixl"])
