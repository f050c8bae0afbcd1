"""Numbers without their surroundings cannot be compared: record once per launch what they were made on."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from pytest_pdperf.engines.base import Command
from pytest_pdperf.gpus.inventory import Inventory
from pytest_pdperf.stack.secrets import MASK, mask, secret_values

ENV_PREFIXES = (
    *("VLLM_", "SGLANG_", "SGL_", "NIXL_", "UCX_", "MC_", "MOONCAKE_", "NCCL_", "CUDA_", "NVIDIA_", "TORCH"),
    *("OMP_", "MKL_", "HF_HUB_", "PYTORCH_", "TRITON_", "FLASHINFER_", "GLOO_", "LMCACHE_", "PDPERF_"),
)
ENV_NAMES = frozenset(
    {"LD_PRELOAD", "PYTHONHASHSEED", "VIRTUAL_ENV", "MALLOC_CONF", "TOKENIZERS_PARALLELISM"}
)
"""Variables that are recorded: those that steer engines, links and libraries. Secrets are masked."""

HARD_KEYS = ("gpus", "gpu_names", "topology", "transport", "model", "dtype", "tensor_parallel")
"""A difference here makes two results incomparable."""


@dataclass(frozen=True, slots=True)
class GpuRecord:
    """One GPU that the launch ran on."""

    name: str
    uuid: str
    memory_mib: int
    sm_max_mhz: int | None = None
    ecc: bool | None = None
    links: tuple[str, ...] = ()
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """What one launch ran on and with. Empty strings and None are holes: the machine did not tell."""

    host: str
    """Hash of the machine's identity: tells machines apart without naming them."""
    kernel: str
    cpu: str
    cpus: int
    """CPUs that this process may use."""
    memory_gib: float | None
    numa_nodes: int | None = None
    rdma: tuple[str, ...] = ()
    """RDMA devices of the machine with state and rate of each port: `mlx5_0/1 ACTIVE 400 Gb/sec (4X NDR)`."""
    driver: str = ""
    cuda: str = ""
    gpus: tuple[GpuRecord, ...] = ()
    gpu_problem: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    """`engine`, `router`, `plugin`, `python`: as reported by the running program where it can be asked."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """Instance id -> full command line, secrets masked."""
    env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """`host` and instance ids -> the variables of ENV_PREFIXES and ENV_NAMES."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Topology, transport, model, dtype and so on, as the caller knows them."""

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the inverse."""
        data: dict[str, Any] = asdict(self)
        data["gpus"] = [{**row, "links": list(row["links"])} for row in data["gpus"]]
        data["rdma"] = list(self.rdma)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Environment:
        """Inverse of `to_json`. Raises ValueError for what is no environment record."""
        if strange := set(data) - {f.name for f in fields(cls)}:
            raise ValueError(f"environment has unknown keys: {', '.join(sorted(strange))}")
        values: dict[str, Any] = dict(data)
        try:
            values["gpus"] = tuple(
                GpuRecord(**{**row, "links": tuple(row.get("links", ()))}) for row in data.get("gpus", ())
            )
            values["rdma"] = tuple(data.get("rdma", ()))
            return cls(**values)
        except (TypeError, AttributeError) as problem:
            raise ValueError(f"environment is malformed: {problem}") from None


def read_environment(
    *,
    commands: Mapping[str, Command] | None = None,
    versions: Mapping[str, str] | None = None,
    uuids: Sequence[str] = (),
    inventory: Inventory | None = None,
    environ: Mapping[str, str] | None = None,
    facts: Mapping[str, str] | None = None,
    proc: Path = Path("/proc"),
    etc: Path = Path("/etc"),
    sys: Path = Path("/sys"),
) -> Environment:
    """Record the machine, the versions and the command lines of one launch.

    With `uuids` the GPUs of those UUIDs (or MIG slices) are looked up in `inventory`, read from the driver
    when it is not given; without, no driver is asked. `versions` should come from the running servers.
    """
    host_env = dict(os.environ if environ is None else environ)
    if uuids and inventory is None:
        from pytest_pdperf.gpus.nvml import read_inventory

        inventory = read_inventory()
    plan = dict(commands or {})
    hidden = secret_values({**host_env, **{k: v for c in plan.values() for k, v in c.env.items()}})
    return Environment(
        host=host_hash(etc),
        kernel=platform.release(),
        cpu=_cpu(proc),
        cpus=len(os.sched_getaffinity(0)),
        memory_gib=_memory_gib(proc),
        numa_nodes=sum(1 for _ in sys.glob("devices/system/node/node[0-9]*")) or None,
        rdma=tuple(_rdma(sys)),
        driver=inventory.driver if inventory else "",
        cuda=inventory.cuda if inventory else "",
        gpus=_gpus(inventory, uuids) if inventory else (),
        gpu_problem=_gpu_problem(inventory, uuids),
        versions={"python": platform.python_version(), **(versions or {})},
        commands={name: mask(shlex.join(c.argv), hidden) for name, c in plan.items()},
        env={
            "host": selected_env(host_env, hidden),
            **{
                name: selected_env({k: v or "" for k, v in c.env.items()}, hidden) for name, c in plan.items()
            },
        },
        facts={key: mask(value, hidden) for key, value in (facts or {}).items()},
    )


def selected_env(env: Mapping[str, str], hidden: Sequence[str] = ()) -> dict[str, str]:
    """The variables worth recording, sorted, with secret values masked."""
    known = tuple(hidden) or secret_values(env)
    secret_names = {name for name, value in env.items() if value and secret_values({name: value})}
    return {
        name: MASK if name in secret_names else mask(value, known)
        for name, value in sorted(env.items())
        if name in ENV_NAMES or name.startswith(ENV_PREFIXES)
    }


def host_hash(etc: Path = Path("/etc")) -> str:
    """Twelve hex digits that stay the same on one machine and do not name it."""
    try:
        identity = (etc / "machine-id").read_text().strip()
    except OSError:
        identity = ""
    return hashlib.sha256(f"{identity}/{platform.node()}".encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether two environments may be compared. `blocking` differences forbid it, `notes` are only told."""

    status: Literal["comparable", "comparable_with_note", "not_comparable"]
    blocking: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def compare_environments(old: Environment, new: Environment) -> Comparison:
    """Tell what differs: hardware, transport and model block; versions, drivers and settings are noted.

    Another host of the same kind is comparable: it is not even a note. Versions are what is under test.
    """
    a, b = _keys(old), _keys(new)
    a["model"], b["model"] = _models(old, new)
    blocking = [f"{key}: {a[key]} -> {b[key]}" for key in HARD_KEYS if a.get(key, "") != b.get(key, "")]
    soft = [
        f"{key}: {a.get(key, '?')} -> {b.get(key, '?')}"
        for key in _soft_keys(a, b)
        if a.get(key) != b.get(key)
    ]
    if blocking:
        return Comparison("not_comparable", tuple(blocking), tuple(soft))
    return Comparison("comparable_with_note" if soft else "comparable", (), tuple(soft))


def _models(old: Environment, new: Environment) -> tuple[str, str]:
    """The models by their digests where both are known, else by name: where a folder lies is no difference."""
    names = [env.facts.get("model", "").rstrip("/").rpartition("/")[2] for env in (old, new)]
    digests = [env.facts.get("model_digest", "") for env in (old, new)]
    if all(digests):
        same = digests[0] == digests[1]
        names = ["", ""] if same else [f"{n} ({d})" for n, d in zip(names, digests, strict=True)]
    return names[0], names[1]


def _keys(env: Environment) -> dict[str, str]:
    found = {
        "gpus": str(len(env.gpus)),
        "gpu_names": " + ".join(sorted({gpu.name for gpu in env.gpus})),
        "driver": env.driver,
        "kernel": env.kernel,
        "cpu": env.cpu,
        **{key: env.facts.get(key, "") for key in HARD_KEYS if key not in ("gpus", "gpu_names")},
    }
    found.update({f"version of {key}": value for key, value in env.versions.items()})
    return found


def _soft_keys(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    return sorted((set(a) | set(b)) - set(HARD_KEYS))


def version_mismatch(reported: str, claimed: str) -> str | None:
    """A note when an image tag or package claims another version than the running server reports.

    Claims that do not hold the reported number are shown; an unknown on either side says nothing.
    """
    if not reported or not claimed or "unknown" in (reported, claimed) or reported in claimed:
        return None
    return f"the server reports {reported}, its package or image says {claimed}"


def _gpus(inventory: Inventory, uuids: Sequence[str]) -> tuple[GpuRecord, ...]:
    found = []
    for uuid in uuids:
        gpu = inventory.gpu(uuid)
        if gpu is not None:
            found.append(
                GpuRecord(
                    *(gpu.name, uuid, gpu.memory_mib, gpu.sm_max_mhz, gpu.ecc_enabled, gpu.links),
                    numa_node=gpu.numa_node,
                )
            )
    return tuple(found)


def _gpu_problem(inventory: Inventory | None, uuids: Sequence[str]) -> str:
    if inventory is None:
        return ""
    missing = [uuid for uuid in uuids if inventory.gpu(uuid) is None]
    return inventory.problem or (f"not in the inventory: {', '.join(missing)}" if missing else "")


def _rdma(sys: Path) -> Iterator[str]:
    for port in sorted(sys.glob("class/infiniband/*/ports/*")):
        try:
            state, rate = ((port / name).read_text().strip() for name in ("state", "rate"))
        except OSError:
            continue
        yield f"{port.parts[-3]}/{port.name} {state.rpartition(': ')[2]} {rate}"


def _cpu(proc: Path) -> str:
    try:
        lines = (proc / "cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gib(proc: Path) -> float | None:
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                return round(int(line.split()[1]) / 1024 / 1024, 1)
    except (OSError, ValueError, IndexError):
        return None
    return None
