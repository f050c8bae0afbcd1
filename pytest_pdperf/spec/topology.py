"""What to bring up: roles, their parallelism, the KV path between them and the router in front."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Scalar = str | int | float | bool | None
FlagValue = Scalar | list[Scalar] | dict[str, object]


class Frozen(BaseModel):
    """Base of every spec model: unknown keys are errors and nothing changes after validation."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Kind(StrEnum):
    """The two ways of serving that the suite compares; also the pytest marker of a topology's items."""

    PD = "pd"
    AGGREGATED = "aggregated"


class Role(StrEnum):
    """What one engine process does."""

    PREFILL = "prefill"
    DECODE = "decode"
    SERVER = "server"


class RoleSpec(Frozen):
    """How many copies of a role to start and how each is parallelised."""

    replicas: int = Field(default=1, ge=1)
    tensor_parallel: int = Field(default=1, ge=1)
    args: dict[str, FlagValue] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """GPUs that all copies of this role need together."""
        return self.replicas * self.tensor_parallel


class KvTransfer(Frozen):
    """How the KV cache moves from prefill to decode."""

    connector: Literal["nixl", "mooncake", "example"] = "nixl"
    transport: Literal["auto", "tcp", "rdma", "nvlink"] = "auto"


class RouterSpec(Frozen):
    """The router in front; `name` is left out to take the engine's usual one."""

    name: str | None = None
    policy: str = "round_robin"
    port: int | None = Field(default=None, ge=1, le=65535)
    args: dict[str, FlagValue] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)


class Topology(Frozen):
    """One deployment to measure. Names no GPU indices and, unless it must, no engine."""

    name: str
    kind: Kind
    roles: dict[Role, RoleSpec]
    engine: str | None = None
    kv_transfer: KvTransfer | None = None
    router: RouterSpec = RouterSpec()
    engine_args: dict[str, FlagValue] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    placement: dict[str, list[int]] = Field(default_factory=dict)
    """Overrides: instance id such as `prefill-0` -> positions in the `--gpus` list."""

    @model_validator(mode="after")
    def _roles_fit_kind(self) -> Topology:
        have = set(self.roles)
        want = {Role.PREFILL, Role.DECODE} if self.kind is Kind.PD else {Role.SERVER}
        if have != want:
            names = " and ".join(sorted(want))
            raise ValueError(f"kind {self.kind.value!r} needs exactly the roles {names}, got {', '.join(sorted(have))}")
        if self.kind is Kind.PD and self.kv_transfer is None:
            object.__setattr__(self, "kv_transfer", KvTransfer())
        if self.kind is Kind.AGGREGATED and self.kv_transfer is not None:
            raise ValueError("kv_transfer belongs to kind 'pd' only")
        return self

    @property
    def gpus(self) -> int:
        """GPUs that the whole topology needs."""
        return sum(spec.gpus for spec in self.roles.values())

    @property
    def instances(self) -> tuple[tuple[str, Role, RoleSpec], ...]:
        """(`prefill-0`, role, spec) for every engine process, in start order."""
        order = (Role.PREFILL, Role.DECODE, Role.SERVER)
        return tuple(
            (f"{role.value}-{i}", role, self.roles[role])
            for role in order
            if role in self.roles
            for i in range(self.roles[role].replicas)
        )
