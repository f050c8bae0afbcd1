"""A cluster is looked into through kmock, an emulator of the Kubernetes API that keeps what clients change.

What happens to pods comes over the API, as `kubectl` would do it. kmock 0.8 forwards no ports and streams no logs, so
these are tested against `kube_api`; it ignores selectors in lists, which are applied here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio.from_thread import start_blocking_portal

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.options import Settings, resolve
from pytest_pdperf.places.deployment import look
from pytest_pdperf.places.found import explained, named_in
from pytest_pdperf.places.kubernetes import Cluster, read_wanted
from tests.integration.places.kube_api import NAMESPACE, FakePod, config, matches, node

kmock = pytest.importorskip("kmock", reason="the API emulator kmock is not installed (extra test)")
pytest.importorskip("kr8s", reason="the library kr8s is not installed (extra k8s)")

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SELECTORS = ["prefill=role=prefill", "decode=app=vllm,role=decode", "router=app=router"]
MERGE = {"content-type": "application/merge-patch+json"}


@dataclass
class Emulated:
    """The emulator, and a second client of it that plays everybody else in the cluster."""

    api: Any
    others: httpx.Client

    def create(self, pod: FakePod, **meta: Any) -> None:
        body = pod.json()
        body["metadata"] |= {"namespace": NAMESPACE} | meta
        path = PODS.replace(f"/{NAMESPACE}/", f"/{body['metadata']['namespace']}/")
        self.others.post(path, json=body).raise_for_status()

    def patch(self, name: str, change: dict[str, Any]) -> None:
        self.others.patch(f"{PODS}/{name}", json=change, headers=MERGE).raise_for_status()

    def delete(self, name: str) -> None:
        self.others.delete(f"{PODS}/{name}").raise_for_status()


@contextmanager
def emulator(kubeconfig: Path) -> Iterator[Emulated]:
    """Serves while inside; the kubeconfig leads to it."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(kmock.KubernetesEmulator()) as api,
        portal.wrap_async_context_manager(kmock.Server(api)),
    ):

        def selected(request: Any) -> dict[str, Any]:
            items = [
                item.raw
                for (kind, namespace, _), item in api.objects.items()
                if kind == request.resource and request.namespace in (None, namespace) and not item.deleted
            ]
            return {
                "kind": "List",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": "1"},
                "items": [item for item in items if matches(item, dict(request.params))],
            }

        for plural in ("pods", "nodes"):
            api.resources[f"v1/{plural}"] = {
                "namespaced": plural == "pods",
                "verbs": {"get", "list", "delete"},
            }
            api["list", kmock.resource(f"v1/{plural}")] << selected
        api["get /version/"] << {"major": "1", "minor": "33", "gitVersion": "v1.33.1"}
        url = str(api.url).rstrip("/")
        kubeconfig.write_text(json.dumps(config(url)))
        with httpx.Client(base_url=url, trust_env=False) as others:
            yield Emulated(api, others)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """Two engines and a router, one pod that has ended, and a namesake in another namespace."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with emulator(tmp_path / "kubeconfig") as emulated:
        emulated.create(FakePod("p-x", {"app": "vllm", "role": "prefill"}, gpus=2))
        emulated.create(FakePod("d-y", {"app": "vllm", "role": "decode"}, gpus=2, node="node-b"))
        emulated.create(FakePod("d-old", {"app": "vllm", "role": "decode"}, phase="Succeeded"))
        emulated.create(FakePod("r", {"app": "router"}))
        emulated.create(FakePod("d-z", {"app": "vllm", "role": "decode"}, gpus=8), namespace="other")
        for name, labels in {"node-a": {"nvidia.com/gpu.product": "NVIDIA-H100"}, "node-b": {}}.items():
            emulated.others.post("/api/v1/nodes", json=node(name, labels)).raise_for_status()
        yield emulated


def settings(*selectors: str, namespace: str = NAMESPACE) -> Settings:
    given = {"pdperf_k8s": namespace, "pdperf_k8s_selector": list(selectors or SELECTORS)}
    return resolve(given.get, lambda name: None)


@contextmanager
def opened(chosen: Settings) -> Iterator[Cluster]:
    found = Cluster(read_wanted(chosen))
    try:
        named_in(found, chosen)
        yield found
    finally:
        found.close()


def test_pods_are_found_by_namespace_and_labels(cluster: Emulated) -> None:
    with opened(settings()) as found:
        assert [(pod.id, pod.name, pod.node, pod.gpus) for pod in found.pods] == [
            ("prefill-0", "p-x", "node-a", 2),
            ("decode-0", "d-y", "node-b", 2),
            ("router-0", "r", "node-a", 0),
        ]
        assert found.hardware == "2x NVIDIA-H100 + 2x nvidia.com/gpu"
        assert found.look() == ()
    resources = cluster.others.get("/api/v1").json()["resources"]
    assert {row["name"]: row["namespaced"] for row in resources} == {"pods": True, "nodes": False}
    assert len(cluster.api["get"]) > 5
    assert len(cluster.api) - len(cluster.api["get"]) == 7, (
        "the suite only reads: 7 objects are the test's own"
    )


@pytest.mark.parametrize(
    ("selectors", "namespace", "words"),
    [
        (
            ["prefill=role=prefil", *SELECTORS[1:]],
            NAMESPACE,
            "prefill=role=prefil: no running pod in namespace llm; labels of the pods there: app=router (1), "
            "app=vllm (2), role=decode (1), role=prefill (1)",
        ),
        (SELECTORS, "nowhere", "no running pod in namespace nowhere, which has none at all"),
    ],
    ids=["labels", "namespace"],
)
def test_selectors_that_match_nothing_are_refused(
    cluster: Emulated, selectors: list[str], namespace: str, words: str
) -> None:
    with pytest.raises(UsageProblem) as problem, opened(settings(*selectors, namespace=namespace)):
        pass
    assert words in str(problem.value)


def test_pods_that_are_not_ready_are_refused(cluster: Emulated) -> None:
    waiting = {"name": "vllm", "restartCount": 4, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    unready = {"type": "Ready", "status": "False", "reason": "ContainersNotReady"}
    cluster.patch("d-y", {"status": {"conditions": [unready], "containerStatuses": [waiting]}})
    with pytest.raises(UsageProblem, match=r"pod d-y is not ready \(CrashLoopBackOff\)"), opened(settings()):
        pass
    cluster.patch("d-y", {"status": {"conditions": [unready | {"status": "True"}]}})
    with opened(settings()):
        pass


def test_a_forward_that_is_refused_is_why_nothing_answers(cluster: Emulated) -> None:
    cluster.api["get", kmock.subresource("portforward")] << 403
    with opened(settings()) as found, pytest.raises(UsageProblem) as problem, explained(found):
        look(named_in(found, settings()), ())
    assert "no answer" in str(problem.value)
    assert "a port-forward to pod r broke: HTTP 403, no WebSocket" in str(problem.value)


def test_a_restart_is_seen_after_a_cell(cluster: Emulated) -> None:
    with opened(settings()) as found:
        ended = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
        status = {"name": "vllm", "restartCount": 1, "lastState": ended}
        cluster.patch("d-y", {"status": {"containerStatuses": [status]}})
        assert found.look() == ("pod d-y: container vllm restarted (0 -> 1, OOMKilled, exit code 137)",)


def test_a_pod_that_only_lost_its_labels_is_the_same(cluster: Emulated) -> None:
    with opened(settings()) as found:
        cluster.patch("d-y", {"metadata": {"labels": {"role": "none"}}})
        assert found.look() == ()


def test_a_deleted_pod_is_seen_while_it_ends_and_once_it_is_gone(cluster: Emulated) -> None:
    cluster.patch("d-y", {"metadata": {"finalizers": ["test/slow"]}})
    with opened(settings()) as found:
        cluster.delete("p-x")
        cluster.delete("d-y")
        assert sorted(found.look()) == ["pod d-y is being deleted", "pod p-x is gone"]
    with pytest.raises(UsageProblem, match="prefill=role=prefill: no running pod"), opened(settings()):
        pass


def test_a_pod_of_the_same_name_is_another_pod(cluster: Emulated) -> None:
    with opened(settings()) as found:
        cluster.delete("p-x")
        cluster.create(FakePod("p-x", {"app": "vllm", "role": "prefill"}, gpus=2, uid="second"))
        assert found.look() == ("pod p-x was replaced by another of its name",)


def test_an_api_that_ends_in_mid_run_is_unknown_not_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    chosen = settings("server=role=server")
    found = Cluster(read_wanted(chosen))
    try:
        with emulator(tmp_path / "kubeconfig") as emulated:
            emulated.create(FakePod("s", {"role": "server"}))
            named_in(found, chosen)
            assert found.look() == ()
        (text,) = found.look()
        assert "restarts are not known" in text
    finally:
        found.close()
