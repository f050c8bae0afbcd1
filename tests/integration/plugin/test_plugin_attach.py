"""The suite on a deployment that it did not bring up: simulated engines behind the real vllm-router, started here."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.places.deployment import look
from pytest_pdperf.places.greeting import greet
from pytest_pdperf.places.named import Named
from pytest_pdperf.spec.topology import Role
from pytest_pdperf.stack.access import Access
from tests.integration.places.answering import answering
from tests.integration.plugin_runs import measured_run, with_fixtures
from tests.integration.sim.sim_processes import Process, house, until
from tests.integration.sim.test_sim_router import start_router

TLS = Path(__file__).parents[2] / "data" / "tls"
SUITE = """
import pytest

@pytest.mark.pdperf_cells("single")
def test_cell(measure, gate):
    gate.check(measure())

@pytest.mark.pdperf_cells("none")
def test_greedy(pdperf, stack):
    from pytest_pdperf.errors import CannotCompare
    try:
        answers = pdperf.greedy_answers(64)
    except CannotCompare as reason:
        pytest.skip(str(reason))
    assert set(answers) == {"through the router", "prefill-0 alone", "decode-0 alone"}
    assert len(set(answers.values())) == 1
"""
PAIR = "kind: pd\nroles: {prefill: {replicas: 1}, decode: {replicas: 1}}\n"
CELL = "shapes: [64/24]\nconcurrency: [2]\nrequests: 8\nwarmups: 1\ntimeout_s: 60\n"
KEY = "a-key-that-no-file-may-hold"


@dataclass
class Running:
    router: Process
    prefill: Process
    decode: Process

    @property
    def roles(self) -> list[str]:
        """Both engines by name."""
        return ["--target-role", f"prefill={self.prefill.url}", "--target-role", f"decode={self.decode.url}"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A PD deployment of somebody else's."""
    with house(tmp_path_factory.mktemp("theirs")) as opened:
        prefill, decode = opened.engine("prefill", wait=False), opened.engine("decode", wait=False)
        for engine in (prefill, decode):
            until(engine.answers, "engines are healthy")
        yield Running(start_router(opened, prefill, [decode]), prefill, decode)


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A user's repository."""
    pytester.makepyfile(test_perf=SUITE)
    with_fixtures(pytester, {"topologies/pair.yaml": PAIR, "workloads/small.yaml": CELL})
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    always = ["--workload", "small", "-p", "no:cacheprovider", "-rs"]
    return measured_run(project, *always, *arguments, timeout=180)


def test_a_deployment_with_named_engines_is_measured_proven_and_left_running(
    project: pytest.Pytester, running: Running
) -> None:
    result = run(
        project,
        "--target",
        running.router.url,
        *running.roles,
        "--target-hardware",
        "2xLab",
        "--update-baselines=create",
    )
    assert result.parseoutcomes() == {"passed": 2}
    result.stdout.fnmatch_lines(["*SIMULATED*attached to *", "*in64-out24-c2*attached-1p1d*8/8*proven*"])
    (stored,) = (project.path / "baselines").rglob("*.json")
    assert stored.relative_to(project.path / "baselines") == Path("attached-2xlabx0/sim/m/attached-1p1d.json")
    (folder,) = (project.path / "pdperf-results").iterdir()
    assert not (folder / "logs").exists(), "nothing was launched"
    facts = json.loads((folder / "environment" / "attached-1p1d.json").read_text())["facts"]
    assert (facts["target"], facts["decode-0"], facts["tls"]) == (
        running.router.url,
        running.decode.url,
        "none",
    )
    assert all(one.popen.poll() is None for one in (running.router, running.prefill, running.decode))


def test_without_its_engines_the_path_is_unknown_and_so_the_cell_invalid(
    project: pytest.Pytester, running: Running
) -> None:
    result = run(project, "--target", f"{running.router.url}/v1", "--topology", "pair")
    assert result.parseoutcomes() == {"failed": 1, "skipped": 1}
    result.stdout.fnmatch_lines(
        ["*INVALID*unknown*", "*decode-0*its address is not known: give --target-role decode=URL*"]
    )
    result.stdout.fnmatch_lines(["*SKIPPED*no engine behind the target is named*"])
    (cell,) = (project.path / "pdperf-results").glob("*/cells/*.json")
    assert json.loads(cell.read_text())["details"]["drained_in_s"] is None, "nobody was waited for"


def test_mixed_up_roles_are_found_by_who_received_kv(running: Running) -> None:
    roles = {"prefill-0": (Role.PREFILL, running.decode.url), "decode-0": (Role.DECODE, running.prefill.url)}
    with pytest.raises(UsageProblem, match=r"mixed up\?"):
        greet(look(Named(running.router.url, roles), ()))


def test_a_web_server_is_a_usage_error(project: pytest.Pytester) -> None:
    with answering({"/": (200, "<html>")}) as server:
        result = run(project, "--target", server.url)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    pytest.LineMatcher(result.errlines + result.outlines).fnmatch_lines(["*answers, but is no LLM server*"])


@contextmanager
def tls_door(to: str, key: str) -> Iterator[str]:
    """An https:// front door with a certificate of its own authority, which wants a key and passes bytes on."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    host, port = to.removeprefix("http://").split(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(raw: socket.socket) -> None:
        try:
            with context.wrap_socket(raw, server_side=True) as outside:
                head = b""
                while b"\r\n\r\n" not in head:
                    got = outside.recv(65536)
                    if not got:
                        return
                    head += got
                if f"authorization: bearer {key}" not in head.decode("latin-1").lower():
                    outside.sendall(
                        b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                    )
                    return
                with socket.create_connection((host, int(port))) as inside:
                    inside.sendall(head)
                    back = threading.Thread(target=pump, args=(inside, outside), daemon=True)
                    back.start()
                    pump(outside, inside)
                    back.join(60)
        except OSError:
            raw.close()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while got := source.recv(65536):
                sink.sendall(got)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def accept() -> None:
        while True:
            try:
                raw, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(raw,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"https://localhost:{listener.getsockname()[1]}"
    finally:
        listener.close()


def test_tls_and_key_for_everything_and_the_key_in_no_file(
    project: pytest.Pytester, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_KEY", KEY)
    with tls_door(running.router.url, KEY) as door, tls_door(running.prefill.url, KEY) as prefill:
        with tls_door(running.decode.url, KEY) as decode:
            always = [
                "--target",
                door,
                "--target-role",
                f"prefill={prefill}",
                "--target-role",
                f"decode={decode}",
            ]
            with pytest.raises(
                UsageProblem, match=r"CERTIFICATE_VERIFY_FAILED.*--target-ca FILE.*--target-insecure"
            ):
                look(Named(door, access=Access("OUR_KEY")), ())
            open_to_all = look(Named(door, access=Access("OUR_KEY", verify=False)), ())
            assert any("NOT VERIFIED" in note for note in open_to_all.notes)
            result = run(
                project,
                *always,
                "--target-api-key-env",
                "OUR_KEY",
                f"--target-ca={TLS / 'ca.pem'}",
                "-k",
                "test_cell",
            )
    assert result.parseoutcomes() == {"passed": 1, "deselected": 1}
    result.stdout.fnmatch_lines(["*8/8*proven*"])
    (folder,) = (project.path / "pdperf-results").iterdir()
    texts = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert [path for path, text in texts.items() if KEY.encode() in text] == []
    assert KEY not in result.stdout.str() + result.stderr.str()
    (cell,) = folder.glob("cells/*.json")
    assert b"TLS: receive times are user-space stamps" in texts[cell]
    environment = json.loads(texts[folder / "environment" / "attached-1p1d.json"])
    assert environment["facts"]["tls"] == "verified against ca.pem"
