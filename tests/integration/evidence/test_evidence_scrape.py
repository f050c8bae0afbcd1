"""Scraping real sockets: whatever a server does ends as a snapshot or as a reason, in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import create_server

import pytest

from pytest_pdperf.evidence.drain import wait_drained
from pytest_pdperf.evidence.exposition import Snapshot, Unknown
from pytest_pdperf.evidence.scrape import Scraper, metrics_url, scrape

PAGE = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"


class Engine(BaseHTTPRequestHandler):
    """Answers each path with one kind of trouble."""

    protocol_version = "HTTP/1.1"
    stop = threading.Event()
    elsewhere = ""

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""

    def _head(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def do_GET(self) -> None:
        kind = self.path.strip("/").removesuffix("/metrics")
        if kind in ("metrics", "good", "moved/metrics", "moved"):
            if kind == "moved" and not self.path.endswith("/"):
                self._head(307, Location=self.path + "/", Content_Length="0")
                return
            self._head(200, Content_Length=str(len(PAGE)))
            self.wfile.write(PAGE)
        elif kind == "away":
            self._head(302, Location=self.elsewhere, Content_Length="0")
        elif kind == "huge":
            self._head(200, Content_Length=str(50_000_000))
            self._flood(50_000_000)
        elif kind == "short":
            self._head(200, Content_Length=str(len(PAGE) + 10))
            self.wfile.write(PAGE)
            self.close_connection = True
        elif kind == "brief":
            self._head(200, Content_Length=str(len(PAGE)))
            self.wfile.write(PAGE)
            self.close_connection = True
        elif kind == "chunked":
            self._head(200, Transfer_Encoding="chunked")
            for piece in (PAGE[:7], PAGE[7:], b""):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        elif kind == "loop":
            self._head(302, Location=self.path, Content_Length="0")
        elif kind == "slow":
            self._head(200, Content_Length="1000")
            for _ in range(1000):
                if self.stop.wait(0.05):
                    break
                self._write(b"#")
        elif kind == "hang":
            self.stop.wait(20)
        elif kind == "html":
            self._head(200, Content_Length="14")
            self.wfile.write(b"<html></html>\n")
        else:
            self._head(404, Content_Length="0")

    def _write(self, piece: bytes) -> bool:
        try:
            self.wfile.write(piece)
            self.wfile.flush()
        except OSError:
            return False
        return True

    def _flood(self, size: int) -> None:
        piece = b"# " + b"x" * 65533 + b"\n"
        for _ in range(size // len(piece)):
            if not self._write(piece):
                return


@contextmanager
def serving() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        Engine.stop.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    Engine.stop.clear()
    with serving() as url:
        yield url


def test_pages_of_all_roles_come_back_under_their_ids(engine: str) -> None:
    found = scrape({"prefill-0": engine, "decode-0": f"{engine}/good/"}, 5.0)
    assert list(found) == ["prefill-0", "decode-0"]
    for page in found.values():
        assert isinstance(page, Snapshot), page
        assert page.has("vllm:num_requests_running")
        assert page.scraped_at is not None
    assert scrape({}) == {}


@pytest.mark.parametrize("path", ["/good", "/brief", "/chunked", "/moved"])
def test_pages_are_read_again_whether_or_not_the_connection_stays(engine: str, path: str) -> None:
    with Scraper({"a": engine + path}) as scraper:
        pages = []
        for _ in range(3):
            pages.append(scraper.read(10.0)["a"])
            time.sleep(0.05)
    for page in pages:
        assert isinstance(page, Snapshot), page
        assert len(page.series) == 3


def test_a_redirect_on_the_same_server_is_followed(engine: str) -> None:
    assert isinstance(scrape({"a": f"{engine}/moved"}, 5.0)["a"], Snapshot)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nope", "HTTP 404"),
        ("/html", "not Prometheus text"),
        ("/short", "IncompleteRead"),
        ("/huge", "larger than 8388608 bytes"),
        ("/loop", "more than 3 redirects"),
    ],
)
def test_bad_answers_are_unknown_with_the_url(engine: str, path: str, words: str) -> None:
    page = scrape({"a": engine + path}, 10.0)["a"]
    assert isinstance(page, Unknown)
    assert words in page.reason
    assert engine in page.reason


@pytest.mark.parametrize("path", ["/slow", "/hang"])
def test_a_page_that_does_not_come_ends_at_the_deadline(engine: str, path: str) -> None:
    start = time.monotonic()
    page = scrape({"a": engine + path}, 0.4)["a"]
    assert isinstance(page, Unknown)
    assert "no complete page within 0.4 s" in page.reason
    assert 0.3 < time.monotonic() - start < 10


def test_one_dark_engine_does_not_hide_the_others(engine: str) -> None:
    with create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    found = scrape({"a": engine, "b": f"http://127.0.0.1:{port}", "c": "http://127.0.0.1:notaport"}, 2.0)
    assert isinstance(found["a"], Snapshot)
    for name, words in (("b", "ConnectionRefusedError"), ("c", "InvalidURL")):
        page = found[name]
        assert isinstance(page, Unknown)
        assert words in page.reason


def test_a_page_from_another_server_is_refused(engine: str) -> None:
    with serving() as other:
        Engine.elsewhere = f"{other}/metrics"
        page = scrape({"a": f"{engine}/away"}, 5.0)["a"]
        Engine.stop.clear()
    assert isinstance(page, Unknown)
    assert "redirected to another server" in page.reason


def test_wait_drained_works_over_http(engine: str) -> None:
    found = wait_drained({"decode-0": engine}, 5.0, poll_s=0.01)
    assert found.status == "drained"
    assert isinstance(found.snapshots["decode-0"], Snapshot)


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("http://h:1", "http://h:1/metrics"),
        ("http://h:1/", "http://h:1/metrics"),
        ("http://h:1/metrics", "http://h:1/metrics"),
        ("http://h:1/base", "http://h:1/base/metrics"),
    ],
)
def test_metrics_url(base: str, url: str) -> None:
    assert metrics_url(base) == url
