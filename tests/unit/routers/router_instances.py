"""Routers in front of engines, as their command lines are made of."""

from __future__ import annotations

from pytest_pdperf.engines.base import Instance, Ports
from pytest_pdperf.routers.base import RouterInstance
from pytest_pdperf.spec.topology import FlagValue, Kind, KvTransfer, Role, RouterSpec


def worker(role: Role, number: int) -> Instance:
    """An engine behind the router."""
    bootstrap = 8998 + number if role is Role.PREFILL else 0
    return Instance(
        id=f"{role.value}-{number}",
        role=role,
        ports=Ports(http=8200 + number + (10 if role is Role.DECODE else 0), bootstrap=bootstrap),
        devices=(),
        tensor_parallel=1,
        model="m",
        served_model="m",
        args={},
        env={},
        kv_transfer=None,
    )


def router(
    kind: Kind = Kind.PD,
    *,
    connector: str = "nixl",
    args: dict[str, FlagValue] | None = None,
    prefill: int = 1,
    decode: int = 2,
) -> RouterInstance:
    """A router in front of so many engines; of two where they are aggregated."""
    if kind is Kind.PD:
        workers = [worker(Role.PREFILL, i) for i in range(prefill)]
        workers += [worker(Role.DECODE, i) for i in range(decode)]
    else:
        workers = [worker(Role.SERVER, i) for i in range(2)]
    kv = KvTransfer.model_validate({"connector": connector}) if kind is Kind.PD else None
    spec = RouterSpec(policy="round_robin", args=args or {}, env={"RUST_LOG": "info"})
    return RouterInstance(spec=spec, kind=kind, port=8000, metrics_port=9100, workers=workers, kv_transfer=kv)
