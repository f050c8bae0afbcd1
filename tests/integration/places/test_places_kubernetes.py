"""A cluster is looked into through its API: pods by labels, forwards that open and close, logs, restarts."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.options import Settings, resolve
from pytest_pdperf.places.deployment import look
from pytest_pdperf.places.found import named_in, notes_of
from pytest_pdperf.places.kubernetes import Cluster, read_wanted
from tests.integration.places.answering import VLLM_PAGE, answering, models
from tests.integration.places.kube_api import NAMESPACE, TOKEN, FakeCluster, FakePod, kube_api

pytest.importorskip("kr8s", reason="the library kr8s is not installed (extra k8s)")

PAGES = {"/v1/models": models("m", owned_by="vllm"), "/metrics": VLLM_PAGE, "/health": (200, "")}
LABELS = ["prefill=role=prefill", "decode=app=vllm,role=decode", "router=app=router"]


def settings(*selectors: str, **more: Any) -> Settings:
    given = {"k8s": NAMESPACE, "k8s_selector": list(selectors or LABELS)} | more
    return resolve({f"pdperf_{name}": value for name, value in given.items()}.get, lambda name: None)


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.05)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """Two engines and a router, all of which the same small server plays."""
    with answering(PAGES) as server, kube_api(tmp_path) as cluster:
        log = tmp_path / "decode.txt"
        log.write_text("INFO starting\n")
        cluster.pods = [
            FakePod("p-x", {"app": "vllm", "role": "prefill"}, server.url, gpus=2),
            FakePod("d-y", {"app": "vllm", "role": "decode"}, server.url, log, gpus=2, node="node-b"),
            FakePod("d-old", {"app": "vllm", "role": "decode"}, server.url, phase="Succeeded"),
            FakePod("r", {"app": "router"}, server.url),
        ]
        cluster.nodes = {"node-a": {"nvidia.com/gpu.product": "NVIDIA-H100"}, "node-b": {}}
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        yield cluster


@pytest.fixture
def opened(api: FakeCluster) -> Iterator[Cluster]:
    cluster = Cluster(read_wanted(settings()))
    yield cluster
    cluster.close()


def test_pods_become_a_deployment_behind_forwards_that_close(api: FakeCluster, opened: Cluster) -> None:
    named = named_in(opened, settings())
    assert list(named.roles) == ["prefill-0", "decode-0"]
    assert [(pod.name, pod.node, pod.gpus) for pod in opened.pods] == [
        ("p-x", "node-a", 2),
        ("d-y", "node-b", 2),
        ("r", "node-a", 0),
    ]
    assert named.hardware == "2x NVIDIA-H100 + 2x nvidia.com/gpu", "of node-b only the resource is known"
    assert opened.pods[0].describe("NVIDIA-H100") == "pod p-x on node node-a, 2 x NVIDIA-H100"
    assert look(named, ()).engine == "vllm"
    assert api.forwarded >= 3
    assert any("port-forward" in note for note in notes_of(opened, named))
    opened.close()
    until(lambda: not api.forwards, "the forwards are closed")
    for url in opened.urls.values() or [named.url]:
        with pytest.raises(httpx.ConnectError):
            httpx.get(url, trust_env=False)


def test_a_forward_to_a_pod_that_is_gone_ends_at_once_and_says_why(api: FakeCluster, opened: Cluster) -> None:
    url = named_in(opened, settings()).url
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    del api.pods[-1]
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{url}/health", trust_env=False, timeout=60)
    until(lambda: opened.problems, "the reason is told")
    assert opened.problems == ["kubernetes: a port-forward to pod r broke: HTTP 404, no WebSocket"]


@pytest.mark.parametrize("end", ["close", "open"])
def test_connections_in_use_end_with_their_forward(api: FakeCluster, opened: Cluster, end: str) -> None:
    opened.open()
    port = httpx.URL(opened.urls["decode-0"]).port
    assert port is not None
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        until(lambda: api.forwards, "the connection is carried")
        getattr(opened, end)()
        assert client.recv(1) == b"", "its other end is closed"
    until(lambda: not api.forwards, "the API has nothing open")
    assert opened.problems == []


def test_what_is_interrupted_does_not_go_on(api: FakeCluster, opened: Cluster) -> None:
    ended = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(UsageProblem, match=r"no answer of the API within 0\.2 s"):
        opened._call(endless(), 0.2)
    until(lambda: ended, "it is cancelled")


def test_a_front_door_of_its_own_needs_no_forward(api: FakeCluster, opened: Cluster) -> None:
    chosen = settings(target="http://ingress.example")
    named = named_in(opened, chosen)
    assert named.url == "http://ingress.example"
    assert set(opened.urls) == {"prefill-0", "decode-0"}
    assert notes_of(opened, named) == ()


def test_logs_come_as_they_are_written_without_secrets(
    api: FakeCluster, opened: Cluster, tmp_path: Path
) -> None:
    opened.open()
    files = opened.follow_logs(tmp_path / "logs")
    until(lambda: "INFO starting" in files["decode-0"].read_text(), "the log from before we came")
    log = next(pod.log for pod in api.pods if pod.name == "d-y")
    assert log is not None
    with log.open("a") as out:
        out.write("args: --api-key sk-aaaaaaaaaaaaaaaaaaaaaaaa\nINFO later\n")
    until(lambda: "INFO later" in files["decode-0"].read_text(), "the log goes on")
    assert "sk-aaaa" not in files["decode-0"].read_text()
    assert opened.problems == []
    log.unlink()
    until(lambda: opened.problems, "a log that breaks off is told")
    assert opened.problems[0].startswith("kubernetes: no more log of pod d-y: ")


HAPPENED: dict[str, tuple[Callable[[FakeCluster], None], str]] = {
    "restart": (
        lambda api: vars(api.pods[1]).update(restarts=1, ended={"reason": "OOMKilled", "exitCode": 137}),
        "pod d-y: container vllm restarted (0 -> 1, OOMKilled, exit code 137)",
    ),
    "gone": (lambda api: api.pods.__delitem__(1), "pod d-y is gone"),
    "replaced": (
        lambda api: vars(api.pods[1]).update(uid="another"),
        "pod d-y was replaced by another of its name",
    ),
    "failed": (lambda api: vars(api.pods[1]).update(phase="Failed"), "pod d-y is Failed"),
}


@pytest.mark.parametrize(("change", "words"), HAPPENED.values(), ids=HAPPENED)
def test_what_happens_to_a_pod_is_told(
    api: FakeCluster, opened: Cluster, change: Callable[[FakeCluster], None], words: str
) -> None:
    opened.open()
    assert opened.look() == ()
    change(api)
    assert opened.look() == (words,)
    assert dict(opened.happened()) == {"decode-0": words}


def test_polls_find_a_restart_by_themselves(api: FakeCluster, opened: Cluster) -> None:
    opened.open()
    api.pods[0].restarts = 3
    until(opened.happened, "a poll saw it")
    assert "restarted (0 -> 3)" in opened.happened()["prefill-0"]


def test_an_api_that_is_gone_is_unknown_not_fine(api: FakeCluster, opened: Cluster) -> None:
    opened.open()
    opened._api._session.headers["authorization"] = "Bearer expired"
    opened._api.auth.token = "expired"
    api.kubeconfig.write_text(api.kubeconfig.read_text().replace(TOKEN, "expired"))
    (text,) = opened.look()
    assert "restarts are not known" in text
    assert TOKEN not in text


BAD: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "nothing matches": (
        ["prefill=role=prefil", *LABELS[1:]],
        {},
        "prefill=role=prefil: no running pod in namespace llm; labels of the pods there: app=router (1), app=vllm (2)",
    ),
    "two roles": (["prefill=app=vllm", *LABELS[1:]], {}, "pod d-y is matched as prefill and as decode"),
    "another namespace": (LABELS, {"k8s": "nowhere"}, "namespace nowhere, which has none at all"),
    "no front door": (
        LABELS[:2],
        {},
        "where do requests go? Give --k8s-selector router=LABELS, or --target URL",
    ),
    "engines twice": (LABELS, {"target_role": ["server=http://a:1"]}, "both name engines"),
    "launching": (LABELS, {"gpus": "0-7"}, "--k8s brings none up"),
}


@pytest.mark.parametrize(("selectors", "more", "words"), BAD.values(), ids=BAD)
def test_bad_input_says_what_there_is(
    api: FakeCluster, selectors: list[str], more: dict[str, Any], words: str
) -> None:
    chosen = settings(*selectors, **more)
    cluster = Cluster(read_wanted(chosen))
    try:
        with pytest.raises(UsageProblem) as problem:
            named_in(cluster, chosen)
    finally:
        cluster.close()
    assert words in str(problem.value)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kr8s.asyncio", None)
    with pytest.raises(UsageProblem, match=r"pip install 'pytest-pdperf\[k8s\]'"):
        Cluster(read_wanted(settings()))
