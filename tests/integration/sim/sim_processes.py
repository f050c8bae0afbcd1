"""Start simulated engines and a real router for a test, and be sure that they end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

READY_S = 90.0
MODEL = "m"


def free_ports(n: int) -> list[int]:
    """`n` ports that are free now."""
    sockets = [socket.socket() for _ in range(n)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def until(true: Callable[[], object], what: str, seconds: float = READY_S) -> None:
    """Poll until `true()` is true; fail with `what` after a generous time."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.05)


@dataclass
class Process:
    """One process of the test with its log."""

    popen: subprocess.Popen[bytes]
    log: Path
    url: str
    side_channel: int = 0
    args: tuple[str, ...] = ()

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def answers(self, path: str = "/health") -> bool:
        """Whether it serves; fails when the process has ended."""
        assert self.popen.poll() is None, f"ended with {self.popen.returncode}:\n{self.text()}"
        try:
            return httpx.get(self.url + path, timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def metrics(self) -> dict[str, float]:
        """Sample values by name, with `{label=value}` for labels other than engine and model_name."""
        page = httpx.get(self.url + "/metrics", timeout=20, trust_env=False).text
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
                shown = "".join(f"{{{k}={v}}}" for k, v in sorted(labels.items()))
                samples[sample.name.removeprefix("vllm:") + shown] = sample.value
        return samples

    def stop(self) -> None:
        """Ask, then insist."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(15)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait(15)


@dataclass
class House:
    """Everything one test module has started."""

    folder: Path
    started: list[Process] = field(default_factory=list)

    def engine(self, role: str, *options: str, wait: bool = True) -> Process:
        """Start one engine of the `fast` profile."""
        port, side = free_ports(2)
        argv = [sys.executable, "-m", "pytest_pdperf.engines.sim.server", "--role", role, "--port", str(port)]
        argv += ["--served-model-name", MODEL, "--side-channel-port", str(side), *options]
        process = self.start(argv, f"{role}-{port}", f"http://127.0.0.1:{port}")
        process.side_channel = side
        if wait:
            until(process.answers, f"{role} is healthy")
        return process

    def start(self, argv: list[str], name: str, url: str) -> Process:
        """Start any program with a log of its own."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as out:
            popen = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        process = Process(popen, log, url, args=tuple(argv))
        self.started.append(process)
        return process


@contextmanager
def house(folder: Path) -> Iterator[House]:
    """Whatever is started inside has ended afterwards."""
    opened = House(folder)
    try:
        yield opened
    finally:
        for process in reversed(opened.started):
            process.stop()


@dataclass
class Stream:
    """What came back from a streamed request."""

    status: int
    events: list[dict[str, Any]]
    done: bool

    @property
    def error(self) -> object:
        """The error object of the stream, if there is one."""
        return next((event["error"] for event in self.events if "error" in event), None)

    @property
    def tokens(self) -> list[int]:
        """All token ids in order."""
        return [token for choice in self.choices for token in (choice.get("token_ids") or [])]

    @property
    def choices(self) -> list[dict[str, Any]]:
        """First choice of every event that has one."""
        return [event["choices"][0] for event in self.events if event.get("choices")]

    @property
    def finish(self) -> object:
        """The last finish reason."""
        return next((c["finish_reason"] for c in reversed(self.choices) if c.get("finish_reason")), None)

    @property
    def usage(self) -> Mapping[str, int]:
        """Usage of the event without choices."""
        (event,) = [e for e in self.events if e.get("choices") == []]
        assert isinstance(event["usage"], dict)
        return event["usage"]


def body(prompt: list[int] | str, output: int, **more: object) -> dict[str, object]:
    """A greedy request of exact length that shows its token ids."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": output,
        "ignore_eos": True,
        "return_token_ids": True,
        "temperature": 0,
    } | more


def stream(url: str, request: Mapping[str, object], path: str = "/v1/completions") -> Stream:
    """Send one streamed request and read it to its end."""
    asked = {"stream_options": {"include_usage": True}} | dict(request) | {"stream": True}
    events: list[dict[str, Any]] = []
    done = False
    with httpx.stream("POST", url + path, json=asked, timeout=60, trust_env=False) as answer:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                assert not done, "nothing comes after [DONE]"
                events.append(json.loads(line[6:]))
        return Stream(answer.status_code, events, done)


def post(url: str, request: Mapping[str, object], path: str = "/v1/completions") -> httpx.Response:
    """Send one request that is not streamed."""
    return httpx.post(url + path, json=dict(request), timeout=60, trust_env=False)


def prefill_leg(url: str, request: Mapping[str, object]) -> dict[str, object]:
    """What the router does first; gives the `kv_transfer_params` of the answer."""
    asked = dict(request) | {
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    asked.pop("stream_options", None)
    answer = post(url, asked)
    assert answer.status_code == 200, answer.text
    params = answer.json()["kv_transfer_params"]
    assert isinstance(params, dict)
    return params
