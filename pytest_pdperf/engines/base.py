"""The one small interface behind which every engine lives, and the data it works on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pytest_pdperf.spec.topology import FlagValue, KvTransfer, Role, Topology


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start: never a shell string. `env` is added to the parent's environment, None removes a name."""

    argv: tuple[str, ...]
    env: Mapping[str, str | None] = field(default_factory=dict)
    cwd: Path | None = None


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports reserved for one engine process. Ranges are given by their first port."""

    http: int
    side_channel: int = 0
    """First of `tensor_parallel` ports of the NIXL side channel."""
    bootstrap: int = 0
    """Mooncake or SGLang bootstrap server."""
    dist_init: int = 0
    """torch/NCCL rendezvous."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One engine process with everything decided: the input of `Engine.command`."""

    id: str
    role: Role
    ports: Ports
    devices: tuple[str, ...]
    """Strings for CUDA_VISIBLE_DEVICES, or ("cpu",), or () for the simulator."""
    tensor_parallel: int
    model: str
    """Path or name that the engine loads; for sim the name of the timing profile."""
    served_model: str
    args: Mapping[str, FlagValue]
    """engine_args, then the role's args, then the command line's: later wins."""
    env: Mapping[str, str]
    kv_transfer: KvTransfer | None
    host: str = "127.0.0.1"
    numa_node: int | None = None
    peers: Mapping[str, str] = field(default_factory=dict)
    """Reserved for connectors that need to know other instances: id -> base URL."""
    shared_dir: Path | None = None
    """Folder that all engines of a launch share, for connectors that keep KV in files. Made by whoever writes to it
    first, gone when the stack is down."""

    @property
    def url(self) -> str:
        """Base URL of the engine's HTTP server."""
        return f"http://{self.host}:{self.ports.http}"


@dataclass(frozen=True, slots=True)
class Programs:
    """Where engine and router programs are looked up: `--engine-env` first, then this interpreter's, then PATH."""

    search: tuple[Path, ...]

    def find(self, name: str) -> Path | None:
        """Full path of an executable, or None."""
        for folder in self.search:
            candidate = folder / name
            if candidate.is_file():
                return candidate
        return None


class Engine(Protocol):
    """How to start one engine and how to read what it says. Implementations hold no state."""

    name: str
    default_router: str
    simulated: bool

    def check(self, programs: Programs, topology: Topology, devices: Sequence[str]) -> None:
        """Raise UsageProblem for what can be known before a start: missing package, unsupported connector."""

    def command(self, instance: Instance, programs: Programs) -> Command:
        """The command line and environment of one role."""

    def stage(self, line: str) -> str | None:
        """Name of the start-up stage that this log line opens (`loading weights`), or None."""

    def root_cause(self, lines: Sequence[str]) -> str | None:
        """The one log line that explains a death, or None when nothing stands out."""

    def version(self, programs: Programs) -> str:
        """Version of the engine package, `unknown` when it cannot be told."""

    def longest_context(self, model: str) -> int | None:
        """Prompt and output together, in tokens, that a role takes which is not told; None when that is not known."""

    def supported_prompts(self) -> frozenset[str]:
        """Which of `token_ids`, `text`, `generate_ids` the HTTP API takes."""
