"""How one simulated engine process was started, apart from whoever reads command lines and whoever runs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_pdperf.spec.roles import Role

from .faults import Faults
from .profile import Profile


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine process with everything decided."""

    role: Role
    served_model: str
    profile: Profile
    link: str
    faults: Faults
    max_model_len: int
    max_seqs: int
    token_budget: int
    kv_blocks: int
    tensor_parallel: int
    host: str
    side_channel_port: int
    lease_s: float
    recompute_on_failure: bool
    seed: str
    connector: str = "nixl"
    """A key of `connectors.CONNECTORS`."""
    bootstrap_port: int = 0
    shared_storage: Path | None = None
