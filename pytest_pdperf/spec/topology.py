"""What to bring up: roles, their parallelism, the KV path between them and the router in front."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from .roles import Kind, Role

__all__ = [
    "MAX_COPIES",
    "Env",
    "FlagValue",
    "Flags",
    "Frozen",
    "Kind",
    "KvTransfer",
    "Role",
    "RoleSpec",
    "RouterSpec",
    "Scalar",
    "Topology",
]

Scalar = str | int | float | bool | None
FlagValue = Scalar | list[Scalar] | dict[str, object]

MAX_COPIES = 1024
"""Most replicas of a role, and most GPUs of a tensor-parallel group: beyond it is a typing error."""


def _flag_names(flags: dict[str, FlagValue]) -> dict[str, FlagValue]:
    for name in flags:
        if name.startswith("-"):
            raise ValueError(f"write the flag {name!r} without its dashes: {name.lstrip('-')!r}")
        _name_like(name, r"[A-Za-z][A-Za-z0-9._-]*", "a flag name")
    return flags


def _env_names(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        _name_like(name, r"[A-Za-z_][A-Za-z0-9_]*", "a name for an environment variable")
        if "\0" in value:
            raise ValueError(f"the value of {name} holds a NUL character")
    return env


def _name_like(text: str, pattern: str, what: str) -> None:
    if not re.fullmatch(pattern, text):
        raise ValueError(f"{text!r} is not {what}")


def _twice(items: Iterable[int]) -> int | None:
    seen: set[int] = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


Flags = Annotated[dict[str, FlagValue], AfterValidator(_flag_names)]
Env = Annotated[dict[str, str], AfterValidator(_env_names)]


class Frozen(BaseModel):
    """Base of every spec model: unknown keys are errors and nothing changes after validation."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RoleSpec(Frozen):
    """How many copies of a role to start and how each is parallelised."""

    replicas: int = Field(default=1, ge=1, le=MAX_COPIES)
    tensor_parallel: int = Field(default=1, ge=1, le=MAX_COPIES)
    args: Flags = Field(default_factory=dict)
    env: Env = Field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """GPUs that all copies of this role need together."""
        return self.replicas * self.tensor_parallel


class KvTransfer(Frozen):
    """How the KV cache moves from prefill to decode."""

    connector: Literal["nixl", "mooncake", "example"] = "nixl"
    transport: Literal["auto", "tcp", "rdma", "nvlink"] = "auto"

    @model_validator(mode="after")
    def _files_take_no_transport(self) -> KvTransfer:
        if self.connector == "example" and self.transport != "auto":
            raise ValueError(
                f"transport: connector 'example' leaves KV in files of a folder, so {self.transport!r} means nothing; "
                "leave the transport out"
            )
        return self


class RouterSpec(Frozen):
    """The router in front; `name` is left out to take the engine's usual one."""

    name: str | None = None
    policy: str = "round_robin"
    port: int | None = Field(default=None, ge=1, le=65535)
    args: Flags = Field(default_factory=dict)
    env: Env = Field(default_factory=dict)


class Topology(Frozen):
    """One deployment to measure. Names no GPU indices and, unless it must, no engine."""

    name: str
    kind: Kind
    roles: dict[Role, RoleSpec]
    engine: str | None = None
    kv_transfer: KvTransfer | None = None
    router: RouterSpec = RouterSpec()
    engine_args: Flags = Field(default_factory=dict)
    env: Env = Field(default_factory=dict)
    placement: dict[str, list[int]] = Field(default_factory=dict)
    """Overrides: instance id such as `prefill-0` -> positions in the `--gpus` list."""

    @model_validator(mode="after")
    def _roles_fit_kind(self) -> Topology:
        have = set(self.roles)
        want = {Role.PREFILL, Role.DECODE} if self.kind is Kind.PD else {Role.SERVER}
        if have != want:
            names, got = (", ".join(sorted(roles)) or "none" for roles in (want, have))
            raise ValueError(f"roles: kind {self.kind.value!r} needs exactly the roles {names}, got {got}")
        if self.kind is Kind.PD and self.kv_transfer is None:
            object.__setattr__(self, "kv_transfer", KvTransfer())
        if self.kind is Kind.AGGREGATED and self.kv_transfer is not None:
            raise ValueError("kv_transfer: belongs to kind 'pd' only")
        return self

    @model_validator(mode="after")
    def _placement_fits_roles(self) -> Topology:
        sizes = {name: spec.tensor_parallel for name, _, spec in self.instances}
        for name, positions in self.placement.items():
            if name not in sizes:
                known = ", ".join(sizes)
                raise ValueError(f"placement.{name}: no such instance; this topology has {known}")
            size, got = sizes[name], f"got {len(positions)}: {positions}"
            if len(positions) != size:
                raise ValueError(f"placement.{name}: needs {size} positions in the --gpus list, {got}")
            if min(positions) < 0:
                raise ValueError(f"placement.{name}: positions in the --gpus list start at 0, {got}")
        twice = _twice(position for positions in self.placement.values() for position in positions)
        if twice is not None:
            raise ValueError(f"placement: position {twice} is used twice")
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
