"""What is read of a deployment that somebody else runs: engines that are named, and the router's own page."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_pdperf.attached import _instruments, watched_of
from pytest_pdperf.evidence.exposition import Snapshot, Unknown
from pytest_pdperf.evidence.retries import router_retries
from pytest_pdperf.measuring import TopologyLaunch
from pytest_pdperf.places.deployment import Deployment
from pytest_pdperf.spec.topology import Kind
from pytest_pdperf.stack.access import Access

LAUNCH = cast(
    TopologyLaunch,
    SimpleNamespace(topology=SimpleNamespace(kind=Kind.AGGREGATED, instances=(), kv_transfer=None)),
)


@pytest.fixture
def router() -> Iterator[str]:
    """A router that tries one request more again between any two looks at its page."""
    tries = [0]

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tries[0] += 1
            body = f"vllm_router_retries_total {tries[0]}\n".encode() if self.path == "/metrics" else b""
            self.send_response(200 if body else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join(30)
    server.server_close()


def deployment(*routers: str) -> Deployment:
    named = SimpleNamespace(routers=routers, urls={}, access=Access())
    return cast(Deployment, SimpleNamespace(named=named))


def test_a_router_that_is_named_is_asked_for_what_it_tried_again(router: str) -> None:
    there = deployment(router, "http://127.0.0.1:1")
    watched = watched_of(there, LAUNCH)
    assert watched.router_page == router
    look = _instruments(there, LAUNCH).page
    first, last = look(router), look(router)
    assert isinstance(first, Snapshot) and router_retries(first, last) == 1
    assert isinstance(look(f"{router}/elsewhere"), Unknown)


def test_without_a_router_nobody_is_asked() -> None:
    assert watched_of(deployment(), LAUNCH).router_page is None
