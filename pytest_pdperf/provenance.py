"""Where a launch's numbers come from: what they were measured on, and with which versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from .engines.base import Engine, Programs
from .engines.installed import commit_of, version_of
from .evidence.environment import Environment, read_environment
from .evidence.model_identity import model_digest
from .gpus.grammar import Device, DeviceKind, GpuRequest
from .gpus.inventory import Inventory
from .routers.base import Router
from .spec.topology import KvTransfer
from .stack.launch import Stack

CONNECTOR_PACKAGES: Mapping[str, Sequence[str]] = {
    "nixl": ("nixl-cu13", "nixl-cu12", "nixl"),
    "mooncake": (
        *("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"),
        "mooncake-transfer-engine-non-cuda",
    ),
}
"""Connector -> distributions that bring its library, the most telling first; `example` is part of vLLM."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The part of a baseline's key that the machine decides."""

    model: str
    """GPU model, `cpu <model>`, or `simulated`."""
    count: int
    link: str
    """How GPUs reach each other: `NV18`, `PIX`, `loopback`."""


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """Where a launch's numbers come from: recorded with every baseline; only `hardware` is part of its key."""

    hardware: Hardware
    engine_version: str = "unknown"
    driver: str = "unknown"
    environment: Mapping[str, str] = field(default_factory=dict)


def hardware_of(request: GpuRequest | None, devices: Sequence[Device], inventory: Inventory) -> Hardware:
    """What the numbers of a run are measured on; `request` is None for simulated engines."""
    if request is None:
        return Hardware("simulated", 0, "loopback")
    if request.cpu:
        environment = read_environment()
        return Hardware(f"cpu {environment.cpu}", environment.cpus, "loopback")
    gpus = [gpu for device in devices if (gpu := inventory.gpu(device.uuid)) is not None]
    names = sorted({gpu.name for gpu in gpus})
    links = {inventory.link(a, b) for a in gpus for b in gpus if a.uuid != b.uuid}
    return Hardware(" + ".join(names), len(devices), "/".join(sorted(links)) or "none")


def record_of(environment: Environment, hardware: Hardware, canaries: Mapping[str, str]) -> LaunchRecord:
    """What a baseline keeps about a launch."""
    versions = {name: version for name, version in environment.versions.items() if name != "engine"}
    return LaunchRecord(
        hardware=hardware,
        engine_version=environment.versions.get("engine", "unknown"),
        driver=environment.driver or "none",
        environment={
            **versions,
            "cpu": environment.cpu,
            "kernel": environment.kernel,
            **environment.facts,
            **canaries,
        },
    )


def launch_environment(
    stack: Stack,
    *,
    engine: Engine,
    router: Router,
    programs: Programs,
    devices: Sequence[Device],
    inventory: Inventory,
    model: str,
    facts: Mapping[str, str] | None = None,
) -> Environment:
    """The environment record of a stack that is up."""
    return read_environment(
        commands=stack.plan.commands,
        versions={
            "engine": serving_version(stack.plan.instances[0].url) or engine.version(programs),
            "router": router.version(programs),
            **_of_installed(programs.find(engine.name), engine.name, stack.plan.topology.kv_transfer),
        },
        uuids=[device.uuid for device in devices if device.kind is not DeviceKind.CPU],
        inventory=inventory,
        facts={"model": model, **_digest(model), **(facts or {})},
    )


def _digest(model: str) -> dict[str, str]:
    digest = model_digest(model)
    return {"model_digest": digest} if digest else {}


def _of_installed(program: Path | None, engine: str, kv: KvTransfer | None) -> dict[str, str]:
    """Connector version and engine commit, as far as what lies beside the engine's program tells."""
    found = {}
    if commit := commit_of(program, engine):
        found["engine commit"] = commit
    for distribution in CONNECTOR_PACKAGES.get(kv.connector, ()) if kv is not None else ():
        if (version := version_of(program, distribution)) != "unknown":
            found["connector"] = f"{distribution} {version}"
            break
    return found


def serving_version(url: str) -> str:
    """What a running engine says it is, which beats what lies beside its program; empty when it does not say."""
    for path in ("/version", "/server_info", "/get_server_info"):
        try:
            answer = httpx.get(url + path, timeout=5.0, trust_env=False).json()
        except (httpx.HTTPError, ValueError):
            continue
        if isinstance(answer, dict) and isinstance(answer.get("version"), str):
            return str(answer["version"])
    return ""
