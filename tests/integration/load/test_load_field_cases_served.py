"""The client against servers made after public bug reports: what it records, and what the server really saw."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_pdperf.evidence.access_log import Posts, judge_posts
from pytest_pdperf.load.target import Target
from pytest_pdperf.measure.records import Status
from pytest_pdperf.measure.samples import ttft_ms
from pytest_pdperf.spec.topology import Role
from tests.field_cases import FieldCase, field_case
from tests.integration.load.load_tools import closed_plan, drive
from tests.integration.load.scripted_server import HEAD, Script, ScriptedServer, Segment, Served, scripted

MS = 1_000_000
PATIENCE_S = 60.0


def script_of(steps: list[list[Any]]) -> Script:
    """One connection of a report: [ms, what is sent] after one another."""
    segments: list[Segment] = []
    delay = 0.0
    for ms, what in steps:
        delay += ms
        if "RST" in what:
            return Script((), head=None, end="reset", end_delay_ms=delay)
        if what.startswith("HTTP "):
            reply = f"HTTP/1.1 {what.split()[1]} Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            return Script([Segment(delay, reply.encode())], head=None, chunked=False, end="close")
        if "token" in what:
            data = {"choices": [{"index": 0, "text": "x", "finish_reason": None}]}
            segments.append(Segment(delay, b"data: " + json.dumps(data).encode() + b"\n\n"))
        else:
            data = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
            end = b"data: " + json.dumps(data).encode() + b"\n\ndata: [DONE]\n\n"
            segments.append(Segment(delay, end))
        delay = 0.0
    return Script(segments, head=HEAD, end="close")


@contextmanager
def retrying_proxy(upstream: str) -> Iterator[str]:
    """Passes one request on, and once more when the first try brings no 200: a proxy that means well."""
    host, port = upstream.removeprefix("http://").split(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            request = client.recv(65536)
            for _ in range(2):
                with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as server:
                    server.sendall(request)
                    try:
                        part = server.recv(65536)
                    except ConnectionResetError:
                        part = b""
                    if not part.startswith(b"HTTP/1.1 200"):
                        continue
                    while part:
                        client.sendall(part)
                        part = server.recv(65536)
                    return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join(PATIENCE_S)
        listener.close()
    assert not thread.is_alive()


@field_case("018")
@pytest.mark.parametrize("policy", ["no_retry", "retry_once"])
def test_018_a_second_try_is_seen_and_the_clock_is_that_of_the_first(
    case: FieldCase, policy: str, tmp_path: Path
) -> None:
    assert policy in case.given["policy"]
    want = case.want[policy]
    scripts = [script_of(connection["script"]) for connection in case.given["connections"]]
    with scripted(scripts) as server:
        plans = [closed_plan(case.given["logical_requests"])]
        if policy == "no_retry":
            found = drive(Target(url=server.url, model="m"), plans, tmp_path, timeout_s=PATIENCE_S)
        else:
            with retrying_proxy(server.url) as url:
                found = drive(Target(url=url, model="m"), plans, tmp_path, timeout_s=PATIENCE_S)
    (record,) = found.records
    ok = [r for r in found.records if r.status is Status.OK]
    assert (len(found.records), len(ok), len(found.records) - len(ok)) == (
        want["sent"],
        want["completed"],
        want["failed"],
    )
    assert len(server.served) == want["server_seen"]
    posts = Posts(ok=len(ok), failed=len(server.served) - len(ok))
    counts = judge_posts({"server-0": posts}, {"server-0": Role.SERVER}, want["sent"])
    assert counts.retries == want.get("retries", 0)
    assert any("retries" in line for line in counts.problems) == bool(want.get("retries"))
    if want["ttft_ms"] is None:
        assert ttft_ms(record) is None and record.status in (Status.RESET, Status.HTTP_ERROR)
        return
    first, last = server.served[0], server.served[-1]
    token = first_token_of(last)
    measured = ttft_ms(record)
    assert measured is not None and measured >= want["ttft_ms"] - 0.5
    assert measured >= (token - first.seen_ns) / MS, "from the first try on"
    assert (token - last.seen_ns) / MS >= want["ttft_last_try_ms"] - 0.5


def first_token_of(served: Served) -> int:
    return served.sends[0][0]


class Gathered(ScriptedServer):
    """Answers nobody before so many requests are there at once."""

    def __init__(self, wanted: int) -> None:
        self._together = threading.Barrier(wanted)
        super().__init__([script_of([[0, "token"], [0, "token"], [0, "[DONE]"]])])

    def _play(self, sock: socket.socket, script: Script, served: Served) -> bool:
        self._together.wait(PATIENCE_S)
        return super()._play(sock, script, served)


@field_case("029")
def test_029_the_client_holds_as_many_requests_as_it_was_asked_to(case: FieldCase, tmp_path: Path) -> None:
    """No pool, no limit: with one request less at once the server would never answer."""
    clients = case.given["concurrency"]
    server = Gathered(clients)
    try:
        plans = [closed_plan(case.given["requests"], clients)]
        found = drive(Target(url=server.url, model="m"), plans, tmp_path, timeout_s=PATIENCE_S)
    finally:
        server.close()
    assert (
        server.peak == case.want["no_limit"]["server_peak_in_flight"] == min(clients, case.given["requests"])
    )
    assert found.outcome.reached == {"main": clients}
    assert {r.status for r in found.records} == {Status.OK}
