"""What pod specs say: which pods play which role, where they listen, on which GPUs, and whether they restarted.

Pure: works on the API's own JSON. Who fetches it is `kubernetes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_pdperf.errors import UsageProblem

from .named import ROLE_WORDS, ROUTER

Json = Mapping[str, Any]

PORT_NAMES = ("http", "api", "vllm", "sglang", "serve", "server", "openai", "metrics")
"""Names under which containers declare the port that serves requests and metrics, most telling first."""
SHOWN_LABELS = 12


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod that plays a role."""

    id: str
    """Instance id: `prefill-0`, `router-0`."""
    role: str
    name: str
    uid: str
    node: str
    container: str
    """The one whose log and restarts are watched: the engine's, not a sidecar's."""
    port: int
    gpus: int
    gpu_resource: str
    restarts: int

    def describe(self, product: str = "") -> str:
        """One line for records."""
        count = f"{self.gpus} x {product or self.gpu_resource}" if self.gpus else "no GPU in its spec"
        return f"pod {self.name} on node {self.node or 'unknown'}, {count}"


def assignments(texts: Sequence[str], flag: str) -> dict[str, str]:
    """`ROLE=VALUE` options by role. Raises UsageProblem for an unknown role or one that is given twice."""
    found: dict[str, str] = {}
    for text in texts:
        role, separator, value = text.partition("=")
        role, value = role.strip(), value.strip()
        if not separator or role not in ROLE_WORDS or not value:
            raise UsageProblem(f"{flag} {text!r}: want ROLE=... with a role of {', '.join(ROLE_WORDS)}")
        if role in found:
            raise UsageProblem(f"{flag}: role {role} is given twice")
        found[role] = value
    return found


def running(items: Sequence[Json]) -> list[Json]:
    """Pods that run and are not being deleted, by name so that replicas keep their numbers."""
    alive = [
        item
        for item in items
        if item.get("status", {}).get("phase") == "Running"
        and not item.get("metadata", {}).get("deletionTimestamp")
    ]
    return sorted(alive, key=lambda item: str(item["metadata"]["name"]))


def pods_of(role: str, items: Sequence[Json], port: int | None) -> list[Pod]:
    """The running pods of a role. Raises UsageProblem when one is not ready or does not say where it listens."""
    alive = running(items)
    for item in alive:
        _refuse_unready(item)
    return [_pod(role, number, item, port) for number, item in enumerate(alive)]


def _refuse_unready(item: Json) -> None:
    """Raise UsageProblem for a pod that says it cannot serve yet: services leave it out, so it would be no replica."""
    status = item.get("status", {})
    conditions = {row.get("type"): row for row in status.get("conditions") or ()}
    ready = conditions.get("Ready", {})
    if ready.get("status", "True") == "True":
        return
    waiting = [
        str(reason)
        for row in status.get("containerStatuses") or ()
        if (reason := ((row.get("state") or {}).get("waiting") or {}).get("reason"))
    ]
    why = ", ".join(waiting) or ready.get("message") or ready.get("reason") or "it does not say why"
    name = item["metadata"]["name"]
    raise UsageProblem(
        f"--k8s: pod {name} is not ready ({why}); wait for it: kubectl wait --for=condition=Ready pod/{name}"
    )


def refuse_shared(pods: Sequence[Pod]) -> None:
    """Raise UsageProblem for a pod that the selectors of two roles match."""
    roles: dict[str, str] = {}
    for pod in pods:
        other = roles.setdefault(pod.uid, pod.role)
        if other != pod.role:
            raise UsageProblem(
                f"--k8s-selector: pod {pod.name} is matched as {other} and as {pod.role}; make them narrower"
            )


def nothing_matches(role: str, selector: str, namespace: str, everything: Sequence[Json]) -> UsageProblem:
    """The error for a selector without a running pod, with the labels that there are."""
    head = f"--k8s-selector {role}={selector}: no running pod in namespace {namespace}"
    alive = running(everything)
    if not alive:
        return UsageProblem(f"{head}, which has none at all; is it the right namespace and context?")
    labels = Counter(
        f"{key}={value}"
        for item in alive
        for key, value in (item["metadata"].get("labels") or {}).items()
        if key != "pod-template-hash"
    )
    shown = ", ".join(f"{text} ({count})" for text, count in sorted(labels.items())[:SHOWN_LABELS])
    more = f" and {len(labels) - SHOWN_LABELS} more" if len(labels) > SHOWN_LABELS else ""
    return UsageProblem(f"{head}; labels of the pods there: {shown or 'none'}{more}")


def _pod(role: str, number: int, item: Json, port: int | None) -> Pod:
    meta, spec = item["metadata"], item.get("spec", {})
    name = str(meta["name"])
    containers: list[Json] = list(spec.get("containers", ()))
    chosen, resource, gpus = _engine_container(containers)
    return Pod(
        id=f"{role}-{number}",
        role=role,
        name=name,
        uid=str(meta["uid"]),
        node=str(spec.get("nodeName") or ""),
        container=str(chosen.get("name", "")),
        port=port or _port(name, role, chosen, containers),
        gpus=gpus,
        gpu_resource=resource,
        restarts=_restarts(item, str(chosen.get("name", ""))),
    )


def _engine_container(containers: Sequence[Json]) -> tuple[Json, str, int]:
    """(container, GPU resource, GPUs): the one with GPUs, else the first."""
    for container in containers:
        limits = container.get("resources", {}).get("limits") or {}
        for resource, amount in limits.items():
            if str(resource).endswith(("/gpu", "/xpu")) and str(amount).isdigit() and int(amount) > 0:
                return container, str(resource), int(amount)
    return (containers[0] if containers else {}), "", 0


def _port(name: str, role: str, chosen: Json, containers: Sequence[Json]) -> int:
    declared = [(str(one.get("name", "")), int(one["containerPort"])) for one in chosen.get("ports") or ()]
    if len(declared) == 1:
        return declared[0][1]
    for wanted in PORT_NAMES:
        for label, number in declared:
            if label == wanted:
                return number
    all_ports = [int(port["containerPort"]) for one in containers for port in one.get("ports") or ()]
    shown = ", ".join(str(number) for number in all_ports) or "none"
    raise UsageProblem(
        f"pod {name} does not say which port serves (declared: {shown}); give --k8s-port {role}=PORT"
    )


def _restarts(item: Json, container: str) -> int:
    rows = item.get("status", {}).get("containerStatuses") or ()
    return sum(
        int(row.get("restartCount", 0)) for row in rows if row.get("name") == container or not container
    )


def what_happened(pod: Pod, now: Json | None) -> str:
    """Why a pod is not the one it was, in a few words; empty when it is. `now` is None when it is gone."""
    if now is None:
        return f"pod {pod.name} is gone"
    meta, status = now["metadata"], now.get("status", {})
    if str(meta["uid"]) != pod.uid:
        return f"pod {pod.name} was replaced by another of its name"
    if meta.get("deletionTimestamp"):
        return f"pod {pod.name} is being deleted"
    count = _restarts(now, pod.container)
    if count > pod.restarts:
        return (
            f"pod {pod.name}: container {pod.container} restarted ({pod.restarts} -> {count}{_end(now, pod)})"
        )
    if status.get("phase") != "Running":
        return f"pod {pod.name} is {status.get('phase', 'in no known phase')}{_end(now, pod)}"
    return ""


def _end(now: Json, pod: Pod) -> str:
    """`, OOMKilled, exit code 137` of the container's last end, as far as it is told."""
    for row in now.get("status", {}).get("containerStatuses") or ():
        if row.get("name") == pod.container:
            for state in (row.get("lastState") or {}, row.get("state") or {}):
                if ended := state.get("terminated"):
                    return f", {ended.get('reason', 'ended')}, exit code {ended.get('exitCode', '?')}"
    return ""


def hardware_of(pods: Sequence[Pod], products: Mapping[str, str], namespace: str) -> str:
    """Label for the baselines' key: `3x NVIDIA-H100-80GB-HBM3`, or what is known; the namespace when nothing is."""
    engines = [pod for pod in pods if pod.role != ROUTER and pod.gpus]
    if not engines:
        return f"kubernetes {namespace}"
    kinds = Counter[str]()
    for pod in engines:
        kinds[products.get(pod.node) or pod.gpu_resource] += pod.gpus
    return " + ".join(f"{count}x {kind}" for kind, count in sorted(kinds.items()))
