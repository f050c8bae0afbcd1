"""A small Kubernetes API server for tests: pods and nodes by selector, logs that go on, port-forwards over WebSocket.

Speaks what the API reference documents for these paths; everything else is 404. Pods are backed by servers on loopback.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "cluster-token-never-shown"
NAMESPACE = "llm"
CONTAINER_PORT = 8000
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


@dataclass
class FakePod:
    """A pod whose container is a server of the test."""

    name: str
    labels: dict[str, str]
    backend: str = ""
    """`http://127.0.0.1:PORT` that its container port leads to."""
    log: Path | None = None
    gpus: int = 0
    node: str = "node-a"
    restarts: int = 0
    phase: str = "Running"
    uid: str = ""
    ports: tuple[dict[str, Any], ...] = ({"name": "http", "containerPort": CONTAINER_PORT},)
    ended: dict[str, Any] | None = None
    """Why the container ended last: `{reason, exitCode}`."""
    restarts_with: Path | None = None
    """The container has restarted once more as soon as this file exists."""

    def json(self) -> dict[str, Any]:
        """The pod as the API prints it, as far as anybody here reads it."""
        limits = {"nvidia.com/gpu": str(self.gpus)} if self.gpus else {}
        again = int(self.restarts_with is not None and self.restarts_with.exists())
        status: dict[str, Any] = {"name": "vllm", "restartCount": self.restarts + again}
        if self.ended:
            status["lastState"] = {"terminated": self.ended}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": self.name,
                "namespace": NAMESPACE,
                "uid": self.uid or f"uid-{self.name}",
                "labels": self.labels,
            },
            "spec": {
                "nodeName": self.node,
                "containers": [
                    {"name": "vllm", "resources": {"limits": limits}, "ports": list(self.ports)},
                    {"name": "sidecar", "ports": [{"containerPort": 9999}]},
                ],
            },
            "status": {"phase": self.phase, "containerStatuses": [status]},
        }


@dataclass
class FakeCluster:
    """What the API server shows; tests change it while it runs."""

    url: str
    kubeconfig: Path
    pods: list[FakePod] = field(default_factory=list)
    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    forwards: set[int] = field(default_factory=set)
    """Port-forward connections that are open."""
    forwarded: int = 0
    """Port-forward connections so far."""


@contextmanager
def kube_api(folder: Path) -> Iterator[FakeCluster]:
    """Serves while inside; the kubeconfig in `folder` leads to it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.headers.get("authorization") != f"Bearer {TOKEN}":
                self.reply(401, {"message": "Unauthorized"})
                return
            parts = urlsplit(self.path)
            query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
            pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
            if parts.path.startswith("/version"):
                self.reply(200, {"major": "1", "minor": "33", "gitVersion": "v1.33.1"})
            elif parts.path == pods:
                found = [pod.json() for pod in cluster.pods if matches(pod.json(), query)]
                self.reply(200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": found})
            elif parts.path.startswith("/api/v1/namespaces/") and parts.path.endswith("/pods"):
                self.reply(200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": []})
            elif parts.path == "/api/v1/nodes":
                nodes = [node(name, labels) for name, labels in cluster.nodes.items()]
                found = [one for one in nodes if matches(one, query)]
                self.reply(200, {"kind": "NodeList", "apiVersion": "v1", "metadata": {}, "items": found})
            elif parts.path.startswith(pods + "/"):
                name, _, what = parts.path.removeprefix(pods + "/").partition("/")
                pod = next((one for one in cluster.pods if one.name == name), None)
                if pod is None or what not in ("log", "portforward"):
                    self.reply(404, {"message": f"pods {name!r} not found"})
                elif what == "log":
                    self.log_of(pod, query)
                else:
                    self.forward(pod, int(query["ports"]))
            else:
                self.reply(404, {"message": "the server could not find the requested resource"})

        def reply(self, status: int, body: dict[str, Any]) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_of(self, pod: FakePod, query: dict[str, str]) -> None:
            assert query.get("container") == "vllm", "not the sidecar's"
            self.send_response(200)
            self.send_header("content-type", "text/plain")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            offset = 0
            try:
                while not stopping.is_set():
                    data = pod.log.read_bytes()[offset:] if pod.log is not None else b""
                    offset += len(data)
                    if data:
                        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                    if query.get("follow") != "true":
                        self.wfile.write(b"0\r\n\r\n")
                        return
                    time.sleep(0.05)
            except OSError:
                self.close_connection = True

        def forward(self, pod: FakePod, port: int) -> None:
            assert port == CONTAINER_PORT
            key = self.headers["sec-websocket-key"].encode()
            accept = base64.b64encode(hashlib.sha1(key + _GUID).digest()).decode()
            self.send_response(101)
            self.send_header("upgrade", "websocket")
            self.send_header("connection", "Upgrade")
            self.send_header("sec-websocket-accept", accept)
            self.end_headers()
            self.close_connection = True
            cluster.forwarded += 1
            cluster.forwards.add(id(self))
            try:
                bridge(self.connection, pod.backend, port)
            finally:
                cluster.forwards.discard(id(self))

        def log_message(self, format: str, *args: object) -> None:
            pass

    stopping = threading.Event()
    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    url = f"http://127.0.0.1:{listener.server_address[1]}"
    cluster = FakeCluster(url, folder / "kubeconfig")
    cluster.kubeconfig.write_text(json.dumps(config(url)))
    thread = threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield cluster
    finally:
        stopping.set()
        listener.shutdown()
        listener.socket.close()
        thread.join(10)


def config(url: str) -> dict[str, Any]:
    """A kubeconfig with one context."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "me", "namespace": NAMESPACE}}],
        "users": [{"name": "me", "user": {"token": TOKEN}}],
    }


def node(name: str, labels: dict[str, str]) -> dict[str, Any]:
    """A node as the API prints it."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "uid": f"node-{name}", "labels": labels},
    }


def matches(item: dict[str, Any], query: dict[str, str]) -> bool:
    """Whether an object is what equality-based label and field selectors ask for."""
    labels = item["metadata"].get("labels", {})
    wanted = [part for part in query.get("labelSelector", "").split(",") if part]
    fields = [part for part in query.get("fieldSelector", "").split(",") if part]
    return all(
        labels.get(key) == value for key, _, value in (part.partition("=") for part in wanted)
    ) and all(
        item["metadata"].get(key.removeprefix("metadata.")) == value
        for key, _, value in (part.partition("=") for part in fields)
    )


def bridge(outside: socket.socket, backend: str, port: int) -> None:
    """One port-forward: channel 0 carries data, channel 1 errors; each begins with the port's number."""
    # A dependency of kr8s, which is not everywhere: without it the tests are skipped.
    wsproto, events_of = import_module("wsproto"), import_module("wsproto.events")
    BytesMessage, CloseConnection = events_of.BytesMessage, events_of.CloseConnection  # noqa: N806
    ws = import_module("wsproto.connection").Connection(wsproto.ConnectionType.SERVER)
    lock = threading.Lock()

    def send(channel: int, data: bytes) -> None:
        with lock:
            outside.sendall(ws.send(BytesMessage(bytes([channel]) + data)))

    host, _, number = backend.removeprefix("http://").partition(":")
    inside = socket.create_connection((host, int(number)))
    for channel in (0, 1):
        send(channel, struct.pack("<H", port))

    def back() -> None:
        try:
            while data := inside.recv(65536):
                send(0, data)
            with lock:
                outside.sendall(ws.send(CloseConnection(1000)))
        except OSError:
            pass

    thread = threading.Thread(target=back, daemon=True)
    thread.start()
    message = b""
    try:
        while data := outside.recv(65536):
            with lock:
                ws.receive_data(data)
                events = list(ws.events())
            for event in events:
                if isinstance(event, BytesMessage):
                    message += bytes(event.data)
                    if event.message_finished:
                        assert message[0] == 0, "clients write on the data channel"
                        inside.sendall(message[1:])
                        message = b""
                elif isinstance(event, events_of.Ping):
                    with lock:
                        outside.sendall(ws.send(event.response()))
                elif isinstance(event, CloseConnection):
                    return
    except OSError:
        pass
    finally:
        inside.close()
        outside.close()
