"""What the router adds: the difference of two ways, each timed in turn."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest

from pytest_pdperf.spec.topology import Kind, Role
from pytest_pdperf.stack import overhead
from pytest_pdperf.stack.greedy import Answer
from pytest_pdperf.stack.overhead import measure_router_overhead


class World:
    """A stack whose requests take as long as it is told, on a clock of its own."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, kind: Kind, times: dict[str, Iterator[float]]
    ) -> None:
        self.now = 0.0
        self.times = times
        self.asked: list[str] = []
        self.error = ""
        engine = SimpleNamespace(url="engine", id="e", args={})
        self.plan: Any = SimpleNamespace(
            router=object(),
            url="router",
            served_model="m",
            topology=SimpleNamespace(kind=kind),
            instances=[engine],
            prompt_forms=lambda: frozenset({"token_ids"}),
            of_role=lambda role: [engine] if role in (Role.PREFILL, Role.DECODE) else [],
        )
        monkeypatch.setattr(overhead, "ask", self.ask)
        monkeypatch.setattr(overhead, "direct_request", self.direct)

    def ask(self, http: object, url: str, *rest: object, **more: object) -> Answer:
        self.asked.append(url)
        self.now += next(self.times[url])
        return Answer(error=self.error)

    def direct(
        self, plan: object, prefill: object, decode: object, number: int, *rest: object, **more: object
    ) -> bool:
        self.asked.append("pair")
        self.now += next(self.times["pair"])
        return True

    def measure(self, **more: Any) -> overhead.RouterOverhead:
        return measure_router_overhead(self.plan, clock=lambda: self.now, **more)


def test_the_first_request_each_way_is_not_counted_and_an_outlier_does_not_decide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {"router": iter([9.0, 0.052, 0.050, 5.0]), "pair": iter([7.0, 0.048, 0.047, 0.048])}
    world = World(monkeypatch, Kind.PD, times)
    marks: list[int] = []
    found = world.measure(rounds=3, mark=lambda: marks.append(len(world.asked)))
    assert world.asked == ["router", "pair"] * 4
    assert marks == [2, 8]
    assert found.requests == 3
    assert found.added_ms == pytest.approx(4.0)
    assert found.through_ms == pytest.approx(52.0)
    assert found.direct_ms == pytest.approx(48.0)
    assert found.direct_mean_ms == pytest.approx(143 / 3)


def test_aggregated_serving_is_asked_past_the_router_at_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"router": iter([0.05] * 3), "engine": iter([0.06] * 3)}
    found = World(monkeypatch, Kind.AGGREGATED, times).measure(rounds=2)
    assert found.added_ms == pytest.approx(-10.0)


def test_a_failed_request_or_no_router_is_unknown_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, Kind.AGGREGATED, {"router": iter([0.05]), "engine": iter([0.05])})
    world.error = "HTTP 500"
    found = world.measure()
    assert (found.added_ms, found.reason) == (None, "router: HTTP 500")
    world.plan.router = None
    assert world.measure().reason == "there is no router"


class Counting(BaseHTTPRequestHandler):
    """Keeps connections open, as routers do, and notes the one that each request came on."""

    protocol_version = "HTTP/1.1"
    connections: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        self.connections.append(self.client_address[1])
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_every_request_has_a_connection_of_its_own_so_that_no_delayed_ack_is_counted_as_the_routers_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(http: httpx.Client, url: str, *rest: object, **more: object) -> Answer:
        assert http.post(url).status_code == 200
        return Answer()

    world = World(monkeypatch, Kind.AGGREGATED, {})
    monkeypatch.setattr(overhead, "ask", ask)
    monkeypatch.setattr(Counting, "connections", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Counting) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        world.plan.url = world.plan.instances[0].url = f"http://127.0.0.1:{server.server_port}"
        measure_router_overhead(world.plan, rounds=2)
        server.shutdown()
    assert len(Counting.connections) == 6
    assert len(set(Counting.connections)) == 6
