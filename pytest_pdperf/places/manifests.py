"""One topology file, two places: the manifests with which a cluster brings up what the launcher would bring up here.

The engines' command lines come from the same code as the launcher's, so that the two differ in where they run and in
nothing else. Pure: nothing is applied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_pdperf.engines.base import Command, Engine, Instance, Ports, Programs
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.topology import Kind, Role, RoleSpec, Topology

Document = dict[str, Any]

HTTP, SIDE_CHANNEL, BOOTSTRAP, RENDEZVOUS = 8200, 5600, 8998, 29500
FRONT = 8000
"""Port of the sidecar in front of decode, and of servers without one."""
EVERYWHERE = "0.0.0.0"
"""As an engine's host; in its environment the pod's own address takes its place."""
SIDECAR = "ghcr.io/llm-d/llm-d-router-disagg-sidecar:v0.10.0"
POD_IP = {"fieldRef": {"fieldPath": "status.podIP"}}
HERE_ONLY = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"})
"""Environment that only makes sense where GPUs are shared out and models were fetched before."""
_OPERATORS = frozenset(
    {"--model-path", "--host", "--port", "--nccl-port", "--served-model-name", "--kv-transfer-config"}
)
"""Flags that GPUStack's operator renders itself, or that only matter where ports are shared."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a topology does not say."""

    name: str
    """Of the deployment; a Kubernetes name."""
    model: str
    served_model: str
    image: str
    accelerator: str
    """GPUStack's accelerator type, or the resource that pods ask for (`nvidia.com/gpu`)."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Documents to apply, and what they cannot say."""

    documents: tuple[Document, ...]
    notes: tuple[str, ...]


def render(topology: Topology, engine: Engine, order: Order, flavour: str) -> Rendered:
    """The manifests of one topology. Raises UsageProblem for what the flavour cannot bring up."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", order.name):
        raise UsageProblem(f"--name {order.name!r}: want lower-case letters, digits and `-`, at most 42")
    if engine.simulated:
        raise UsageProblem("--engine: simulated engines are not deployed; choose vllm or sglang")
    if flavour == "gpustack":
        return _gpustack(topology, engine, order)
    return _llm_d(topology, engine, order)


def _command(
    topology: Topology, engine: Engine, order: Order, role: Role, spec: RoleSpec, port: int
) -> Command:
    pd = topology.kind is Kind.PD
    instance = Instance(
        id=f"{role.value}-0",
        role=role,
        ports=Ports(port, SIDE_CHANNEL if pd else 0, BOOTSTRAP if pd else 0, RENDEZVOUS),
        devices=tuple(str(number) for number in range(spec.tensor_parallel)),
        tensor_parallel=spec.tensor_parallel,
        model=order.model,
        served_model=order.served_model,
        args={**topology.engine_args, **spec.args},
        env={**topology.env, **spec.env},
        kv_transfer=topology.kv_transfer,
        host=EVERYWHERE,
    )
    return engine.command(instance, Programs(()))


def _env(command: Command) -> list[Document]:
    found: list[Document] = []
    for name, value in sorted(command.env.items()):
        if value is None or name in HERE_ONLY:
            continue
        found.append(
            {"name": name, "valueFrom": POD_IP} if value == EVERYWHERE else {"name": name, "value": value}
        )
    return found


# -- llm-d -------------------------------------------------------------------------------------------------


def _llm_d(topology: Topology, engine: Engine, order: Order) -> Rendered:
    connector = topology.kv_transfer.connector if topology.kv_transfer else None
    if topology.kind is Kind.PD and (connector != "nixl" or engine.name != "vllm"):
        raise UsageProblem(
            f"topology {topology.name}: the llm-d flavour moves KV with vLLM and nixl, not with {engine.name} "
            f"and {connector}; choose --flavour gpustack"
        )
    documents = [_workload(topology, engine, order, role, spec) for role, spec in topology.roles.items()]
    chosen = {"llm-d.ai/model": order.name}
    notes = [
        "the router is llm-d's own chart: install it with a pool that selects " + _selector(chosen),
        f"shared memory, images and models are the cluster's: {order.image} has to find {order.model}",
    ]
    if topology.router.name or topology.router.args:
        notes.append("router.name and router.args of the topology mean nothing to llm-d's router")
    return Rendered(tuple(documents), tuple(notes))


def _selector(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _workload(topology: Topology, engine: Engine, order: Order, role: Role, spec: RoleSpec) -> Document:
    behind = role is Role.DECODE
    port = HTTP if behind else FRONT
    command = _command(topology, engine, order, role, spec, port)
    labels = {
        "app.kubernetes.io/name": order.name,
        "llm-d.ai/inferenceServing": "true",
        "llm-d.ai/model": order.name,
        "llm-d.ai/role": "both" if role is Role.SERVER else role.value,
    }
    ports = [{"name": "http", "containerPort": port}]
    if topology.kind is Kind.PD:
        ports.append({"name": "kv", "containerPort": SIDE_CHANNEL})
    container: Document = {
        "name": "modelserver",
        "image": order.image,
        "command": list(command.argv[:2]),
        "args": list(command.argv[2:]),
        "env": _env(command),
        "ports": ports,
        "resources": {"limits": {order.accelerator: str(spec.tensor_parallel)}},
        "startupProbe": {**_health(port), "periodSeconds": 10, "failureThreshold": 180},
        "readinessProbe": {**_health(port), "periodSeconds": 5},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod: Document = {
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "20Gi"}}],
    }
    if behind:
        pod["initContainers"] = [_sidecar()]
    name = f"{order.name}-{role.value}"
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": spec.replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _health(port: int) -> Document:
    return {"httpGet": {"path": "/health", "port": port}}


def _sidecar() -> Document:
    """Runs the prefill leg that the router chose, then hands over to decode beside it; a native sidecar."""
    return {
        "name": "routing-proxy",
        "image": SIDECAR,
        "restartPolicy": "Always",
        "args": [
            f"--port={FRONT}",
            f"--model-server-port={HTTP}",
            "--kv-connector=nixlv2",
            "--secure-proxy=false",
        ],
        "ports": [{"name": "proxy", "containerPort": FRONT}],
    }


# -- GPUStack ----------------------------------------------------------------------------------------------

_ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
_KINDS = {Role.PREFILL: "Prefill", Role.DECODE: "Decode", Role.SERVER: "Server"}
_PROTOCOLS = {"auto": "Auto", "tcp": "TCP", "rdma": "RDMA"}


def _gpustack(topology: Topology, engine: Engine, order: Order) -> Rendered:
    spec: Document = {
        "model": {"name": order.model},
        "engine": {"name": _ENGINES[engine.name], "image": order.image},
        "router": {"name": "llm-d-router"},
        "roles": [_role(topology, engine, order, role, one) for role, one in topology.roles.items()],
    }
    notes = [
        f"the operator serves the model as {order.model}: measure with --served-model if its list says otherwise"
    ]
    if topology.kv_transfer is not None:
        transport = topology.kv_transfer.transport
        if transport not in _PROTOCOLS:
            raise UsageProblem(
                f"topology {topology.name}: kv_transfer.transport {transport!r} has no name there; it knows "
                f"{', '.join(_PROTOCOLS)}"
            )
        spec["kvTransfer"] = {"protocol": _PROTOCOLS[transport]}
        if topology.kv_transfer.connector != "mooncake":
            notes.append(
                f"kv_transfer.connector {topology.kv_transfer.connector}: the operator chooses the connector itself "
                "(Mooncake); compare with a topology that says so"
            )
    if topology.router.name or topology.router.args:
        notes.append(
            "router.name and router.args of the topology are left out: the operator's router is llm-d's"
        )
    document = {
        "apiVersion": "worker.gpustack.ai/v1",
        "kind": "ModelDeployment",
        "metadata": {"name": order.name},
        "spec": spec,
    }
    return Rendered((document,), tuple(notes))


def _role(topology: Topology, engine: Engine, order: Order, role: Role, spec: RoleSpec) -> Document:
    command = _command(topology, engine, order, role, spec, FRONT)
    own = {**topology.env, **spec.env}
    found: Document = {
        "name": role.value,
        "kind": _KINDS[role],
        "replicas": spec.replicas,
        "acceleratorType": order.accelerator,
        "resources": {"accelerator": spec.tensor_parallel},
        "extraArgs": _extra(list(command.argv), order),
    }
    if own:
        found["env"] = [{"name": name, "value": value} for name, value in sorted(own.items())]
    return found


def _extra(argv: list[str], order: Order) -> list[str]:
    """The flags that are the topology's, without program, model, and what the operator renders."""
    start = next((i for i, word in enumerate(argv) if word.startswith("--")), len(argv))
    out: list[str] = []
    words = iter(argv[start:])
    skipping = False
    for word in words:
        if word.startswith("--"):
            skipping = word in _OPERATORS or word.startswith("--disaggregation")
        if not skipping:
            out.append(word)
    return out
