"""One engine process with everything decided, for the tests of command lines."""

from __future__ import annotations

from pytest_pdperf.engines.base import Instance, Ports, Programs
from pytest_pdperf.spec.topology import FlagValue, KvTransfer, Role

NOWHERE = Programs(())
"""No program is installed."""


def instance(
    role: Role = Role.PREFILL,
    *,
    devices: tuple[str, ...] = ("0",),
    tp: int = 1,
    connector: str | None = "nixl",
    transport: str = "auto",
    args: dict[str, FlagValue] | None = None,
    env: dict[str, str] | None = None,
    numa: int | None = None,
    served: str = "served",
) -> Instance:
    """An instance `x-0` of /models/m with a port of every kind that its role has."""
    kv = KvTransfer.model_validate({"connector": connector, "transport": transport}) if connector else None
    bootstrap = 8998 if role is Role.PREFILL else 0
    return Instance(
        id="x-0",
        role=role,
        ports=Ports(http=8200, side_channel=5600, bootstrap=bootstrap, dist_init=21000),
        devices=devices,
        tensor_parallel=tp,
        model="/models/m",
        served_model=served,
        args=args or {},
        env=env or {},
        kv_transfer=kv,
        numa_node=numa,
    )
