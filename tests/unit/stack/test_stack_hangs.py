"""Silence over several looks is a hang; one slow answer, or a watch that was itself stopped, is not."""

from __future__ import annotations

import http.server
import socket
import threading
import time

import pytest

from pytest_pdperf.stack.greedy import client
from pytest_pdperf.stack.hangs import HangWatch, health


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watch_of(clock: Clock, answers: dict[str, str]) -> HangWatch:
    return HangWatch(
        {id: id for id in answers}, silence_s=10.0, misses=3, ask=lambda url: answers[url], clock=clock
    )


def look(watch: HangWatch, answers: dict[str, str], clock: Clock, seconds: float) -> None:
    for id in answers:
        watch.look(id, lambda url: answers[url])
    clock.now += seconds


def test_only_the_silent_one_is_a_hang_and_only_after_long_enough() -> None:
    clock, answers = Clock(), {"a": "", "b": "timed out"}
    watch = watch_of(clock, answers)
    for _ in range(9):
        look(watch, answers, clock, 1.0)
        assert watch.hangs() == ()
    look(watch, answers, clock, 1.0)
    (hang,) = watch.hangs()
    assert (hang.instance, hang.silent_s, hang.what) == ("b", 10.0, "timed out")


def test_an_answer_ends_the_silence() -> None:
    clock, answers = Clock(), {"a": "timed out"}
    watch = watch_of(clock, answers)
    for _ in range(9):
        look(watch, answers, clock, 1.0)
    answers["a"] = ""
    look(watch, answers, clock, 1.0)
    answers["a"] = "timed out"
    look(watch, answers, clock, 9.0)
    assert watch.hangs() == ()


def test_a_watch_that_was_itself_stopped_proves_nothing() -> None:
    clock, answers = Clock(), {"a": "timed out"}
    watch = watch_of(clock, answers)
    look(watch, answers, clock, 3600.0)
    look(watch, answers, clock, 0.0)
    assert watch.hangs() == ()
    look(watch, answers, clock, 0.0)
    assert len(watch.hangs()) == 1


def test_threads_look_until_they_are_told_to_stop() -> None:
    asked: list[str] = []
    seen = threading.Event()

    def ask(url: str) -> str:
        asked.append(url)
        if len(asked) >= 4:
            seen.set()
        return ""

    watch = HangWatch({"a": "http://a", "b": "http://b"}, period_s=0.01, ask=ask)
    watch.start()
    assert seen.wait(20)
    watch.stop()
    watch.join()
    count = len(asked)
    assert set(asked) == {"http://a", "http://b"}
    time.sleep(0.05)
    assert len(asked) == count, "nobody asks after the end"


def test_stopping_a_watch_that_never_started_is_harmless() -> None:
    watch = HangWatch({"a": "http://a"})
    watch.stop()
    watch.join()


@pytest.mark.parametrize(("status", "what"), [(200, ""), (404, ""), (503, "/health: HTTP 503")])
def test_any_answer_counts_but_a_server_error(status: int, what: str) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server, client() as http_:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert health(http_, f"http://127.0.0.1:{server.server_address[1]}") == what
        thread.join()


def test_a_deaf_and_an_absent_server_are_told_apart() -> None:
    with socket.socket() as deaf, client(0.2) as http_:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        assert health(http_, url).startswith("no answer to /health")
        deaf.close()
        assert health(http_, url) == "/health: ConnectError"
