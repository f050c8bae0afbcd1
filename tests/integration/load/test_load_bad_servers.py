"""Servers that misbehave: each becomes a classified failure that shows its first bytes, and the cell goes on."""

from __future__ import annotations

import json
import resource
import socket
import ssl
import subprocess
import time
from pathlib import Path

import pytest

from pytest_pdperf.load.target import Target
from pytest_pdperf.measure.records import RequestRecord, Status
from tests.integration.load.load_tools import closed_plan, drive
from tests.integration.load.scripted_server import Script, Segment, scripted

GOOD = Script(
    [
        Segment(
            5,
            b"data: "
            + json.dumps({"choices": [{"text": "a", "finish_reason": "length"}]}).encode()
            + b"\n\n",
        ),
        Segment(0, b"data: [DONE]\n\n"),
    ]
)


def raw(head: str, body: bytes = b"", **changes: object) -> Script:
    """An answer outside the event-stream mould."""
    data = "\r\n".join([*head.split("\n"), f"Content-Length: {len(body)}", "", ""]).encode() + body
    return Script([Segment(1, data)], head=None, chunked=False, **changes)  # type: ignore[arg-type]


BAD = {
    "html": (
        raw("HTTP/1.1 200 OK\nContent-Type: text/html", b"<html>Welcome</html>"),
        "parse_error",
        "<html>Welcome",
    ),
    "redirect": (
        raw("HTTP/1.1 302 Found\nLocation: http://other/"),
        "http_error",
        "HTTP 302, Location: http://other/",
    ),
    "busy": (
        raw("HTTP/1.1 429 Too Many Requests\nRetry-After: 3", b'{"error":"slow down"}'),
        "http_error",
        'HTTP 429, Retry-After: 3: {"error":"slow down"}',
    ),
    "unavailable": (
        raw("HTTP/1.1 503 Service Unavailable\nRetry-After: 1", b"no worker"),
        "http_error",
        "HTTP 503, Retry-After: 1: no worker",
    ),
    "closes-at-once": (
        Script([], head=None, chunked=False, end="close"),
        "reset",
        "closed before any answer",
    ),
    "resets-at-once": (Script([], head=None, chunked=False, end="reset"), "reset", "ECONNRESET"),
    "never-answers": (
        Script([], head=None, chunked=False, end="hold"),
        "timeout",
        "no complete answer within 0.5 s",
    ),
    "stops-in-mid-stream": (Script(GOOD.segments[:1], end="hold", final_chunk=False), "timeout", "0.5 s"),
    "not-http": (
        Script([Segment(0, b"SSH-2.0-OpenSSH_9.6\r\n")], head=None, chunked=False),
        "parse_error",
        "SSH-2.0",
    ),
    "bad-chunk-size": (Script([Segment(0, b"zz\r\nhello\r\n")], chunked=False), "parse_error", "not HTTP"),
    "invalid-utf8": (
        Script([Segment(0, b'data: {"choices":[{"text":"\xff"}]}\n\n')]),
        "parse_error",
        "\\xff",
    ),
    "binary": (Script([Segment(0, b"\x00\x01\x02" * 50)]), "parse_error", "\\x00\\x01"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_answer_is_classified_and_the_cell_goes_on(name: str, tmp_path: Path) -> None:
    script, status, message = BAD[name]
    started = time.monotonic()
    with scripted([script, GOOD]) as server:
        driven = drive(Target(server.url, "m"), [closed_plan(3, 1)], tmp_path, timeout_s=0.5)
    bad, *good = driven.records
    assert bad.status == status
    assert message in bad.error
    assert [r.status for r in good] == [Status.OK] * 2
    assert time.monotonic() - started < 15


def first(records: tuple[RequestRecord, ...]) -> tuple[Status, str]:
    return records[0].status, records[0].error


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driven = drive(Target(f"http://127.0.0.1:{port}", "m"), [closed_plan(3, 2)], tmp_path)
    assert {r.status for r in driven.records} == {Status.CONNECT_ERROR}
    assert first(driven.records)[1] == "cannot connect: ECONNREFUSED: Connection refused"
    assert all(r.event_ns == () for r in driven.records)


@pytest.mark.parametrize("end", ["close", "reset"])
def test_a_server_that_hangs_up_after_each_answer_costs_one_request_at_most(end: str, tmp_path: Path) -> None:
    """Its answers do not say so (no `Connection: close`): from then on every request has a fresh connection."""
    answer = b"".join(s.data for s in GOOD.segments)
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer)
    rude = Script([Segment(1, whole)], head=None, chunked=False, end=end)
    with scripted([rude]) as server:
        driven = drive(Target(server.url, "m"), [closed_plan(8, 1)], tmp_path)
    lost = [r for r in driven.records if r.status is not Status.OK]
    assert len(lost) <= 1
    assert all("had carried a request before" in r.error for r in lost)
    assert server.connections >= 8 - len(lost), "a lost request had no connection of its own"


def test_unknown_host(tmp_path: Path) -> None:
    driven = drive(Target("http://no-such-host.invalid:1", "m"), [closed_plan(1)], tmp_path)
    assert first(driven.records)[0] is Status.CONNECT_ERROR


def test_an_endless_event_is_cut_off_in_bounded_memory(tmp_path: Path) -> None:
    piece = Segment(0, b"x" * 1_000_000)
    flood = Script([Segment(0, b'data: {"choices":[{"text":"'), *[piece] * 100])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with scripted([flood, GOOD]) as server:
        driven = drive(Target(server.url, "m"), [closed_plan(2, 1)], tmp_path)
    assert driven.records[0].status is Status.PARSE_ERROR
    assert "more than 8 MiB in one event" in driven.records[0].error
    assert len(driven.records[0].error) < 400
    assert driven.records[1].status is Status.OK
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate with its key, made by the openssl program."""
    path = tmp_path_factory.mktemp("tls") / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-keyout", f"{path}.key", "-out", str(path)]
    try:
        made = subprocess.run(command, check=False, capture_output=True)
    except FileNotFoundError:
        pytest.skip("the openssl program is not installed")
    assert made.returncode == 0, made.stderr
    path.write_bytes(path.read_bytes() + Path(str(path) + ".key").read_bytes())
    return path


def test_bad_certificate_is_refused_and_tls_has_user_stamps(tmp_path: Path, certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with scripted([GOOD], tls=context) as server:
        strict = drive(Target(server.url, "m"), [closed_plan(1)], tmp_path)
        (tmp_path / "b").mkdir()
        loose = drive(Target(server.url, "m", verify_tls=False), [closed_plan(4, 2)], tmp_path / "b")
    assert strict.records[0].status is Status.CONNECT_ERROR
    assert "CERTIFICATE_VERIFY_FAILED" in strict.records[0].error
    assert [r.status for r in loose.records] == [Status.OK] * 4
    assert all(e.user_stamps for e in loose.exchanges)
    earliest = min(served.sends[0][0] for served in server.served if served.sends)
    assert all(r.event_ns[0] >= earliest for r in loose.records)


def test_plain_http_on_a_tls_port(tmp_path: Path, certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with scripted([GOOD], tls=context) as server:
        driven = drive(Target(server.url.replace("https", "http"), "m"), [closed_plan(1)], tmp_path)
    assert driven.records[0].status in (Status.RESET, Status.PARSE_ERROR)


def test_large_request_bodies_leave_whole(tmp_path: Path) -> None:
    from pytest_pdperf.load.planned import Planned, StreamPlan

    prompt = tuple(range(10_000, 10_000 + 400_000))
    plan = StreamPlan("main", (Planned(prompt, 1), Planned((1, 2), 1)), (), 1)
    with scripted([GOOD]) as server:
        driven = drive(Target(server.url, "m"), [plan], tmp_path)
    assert [r.status for r in driven.records] == [Status.OK] * 2
    sent = json.loads(server.served[0].request.partition(b"\r\n\r\n")[2])
    assert tuple(sent["prompt"]) == prompt


def test_an_early_refusal_of_a_large_body_is_read(tmp_path: Path) -> None:
    """The server answers 413 and closes without reading: the answer explains more than the broken pipe."""
    from pytest_pdperf.load.planned import Planned, StreamPlan

    refuse = raw("HTTP/1.1 413 Payload Too Large", b"too long", end="close", read_request=False)
    plan = StreamPlan("main", (Planned(tuple(range(1_000_000, 1_600_000)), 1),), (), 1)
    with scripted([refuse]) as server:
        driven = drive(Target(server.url, "m"), [plan], tmp_path, timeout_s=5)
    status, error = first(driven.records)
    assert status in (Status.HTTP_ERROR, Status.RESET)
    assert error
