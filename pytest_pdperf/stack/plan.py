"""Decides everything about a launch before anything starts: ports, devices, command lines, log files."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_pdperf.engines.base import Command, Engine, Instance, Ports, Programs
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.gpus.cores import ClientCores, client_cores, parse_cores
from pytest_pdperf.routers.base import Router, RouterInstance
from pytest_pdperf.spec.topology import FlagValue, Kind, Role, RoleSpec, Topology
from pytest_pdperf.stack.launcher import LOCAL, LOOPBACK, Launcher
from pytest_pdperf.stack.ports import PortLease, PortRegistry
from pytest_pdperf.stack.secrets import mask, secret_values

_DIST_PORTS = 4
"""Ports from `Ports.dist_init` on that one engine may use for itself."""
_SHARED = "shared-kv"
"""Folder beside the logs, for connectors that keep KV in files."""
_KV_LAYOUT = ("kv_cache_dtype", "block_size", "page_size", "dtype", "quantization")


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A launch with everything decided. Its ports are held, and what its engines share is kept, until `release`."""

    run_id: str
    topology: Topology
    engine: Engine
    router: Router | None
    instances: tuple[Instance, ...]
    commands: Mapping[str, Command]
    """Instance id (and `router`) -> command."""
    router_instance: RouterInstance | None
    served_model: str
    log_dir: Path
    registry: PortRegistry
    leases: tuple[PortLease, ...]
    warnings: tuple[str, ...] = ()
    """What may be a mistake and does not stop a launch, such as roles that differ in KV cache type."""
    client: ClientCores = field(default_factory=lambda: ClientCores((), {}, "not asked"))
    """Where the load client runs, and which CPUs that leaves to each instance."""

    @property
    def cpus(self) -> Mapping[str, tuple[int, ...]]:
        """Instance id -> CPUs of its NUMA node; ids without a preference are left out."""
        return self.client.engines

    launcher: Launcher = LOCAL

    @property
    def url(self) -> str:
        """Base URL that clients talk to: the router's, or the only server's."""
        return self.router_instance.url if self.router_instance is not None else self.instances[0].url

    def log(self, id: str) -> Path:
        """Log file of an instance or of `router`."""
        return self.log_dir / f"{id}.log"

    def of_role(self, role: Role) -> tuple[Instance, ...]:
        """Instances of one role in start order."""
        return tuple(i for i in self.instances if i.role is role)

    def prompt_forms(self) -> frozenset[str]:
        """Which of `token_ids`, `text`, `generate_ids` reach the engine."""
        forms = self.engine.supported_prompts()
        return forms & self.router.supported_prompts() if self.router is not None else forms

    def describe(self) -> list[str]:
        """Lines for `--plan`: what would run where, secrets masked."""
        lines = [
            f"{self.topology.name}: {self.topology.kind.value}, engine {self.engine.name}"
            f"{' (SIMULATED)' if self.engine.simulated else ''}, model {self.served_model}, url {self.url}"
        ]
        lines += [f"  warning: {text}" for text in self.warnings]
        for instance in self.instances:
            where = self.launcher.where(instance.id, instance.devices)
            ports = ", ".join(
                f"{name} {value}"
                for name, value in (
                    ("http", instance.ports.http),
                    ("side channel", instance.ports.side_channel),
                    ("bootstrap", instance.ports.bootstrap),
                    ("rendezvous", instance.ports.dist_init),
                )
                if value
            )
            lines.append(f"  {instance.id} on {where}: {ports}")
            lines += self._command_lines(instance.id)
        if self.router_instance is not None and self.router is not None:
            host = self.router_instance.host
            at = "" if host == LOOPBACK else f" on {host}"
            lines.append(
                f"  router {self.router.name}{at}: http {self.router_instance.port}, "
                f"metrics {self.router_instance.metrics_port}"
            )
            lines += self._command_lines("router")
        lines.append(f"  load client on {self.client.describe()}")
        return lines

    def _command_lines(self, id: str) -> list[str]:
        command = self.launcher.shown(id, self.commands[id])
        values = secret_values(command.env)
        env = " ".join(f"{k}={'' if v is None else v}" for k, v in sorted(command.env.items()))
        argv = " ".join(repr(a) if re.search(r"[\s'\"{}]", a) else a for a in command.argv)
        return [f"    {mask(argv, values)}"] + ([f"    env {mask(env, values)}"] if env else [])

    def ports(self) -> tuple[tuple[str, str, int], ...]:
        """(instance id, what for, port) of every port that a process of this plan will listen on."""
        found = [
            (instance.id, what, first + rank)
            for instance in self.instances
            for what, first, count in (
                ("http", instance.ports.http, 1),
                ("side channel", instance.ports.side_channel, instance.tensor_parallel),
                ("bootstrap", instance.ports.bootstrap, 1),
                ("rendezvous", instance.ports.dist_init, _DIST_PORTS),
            )
            for rank in range(count)
            if first
        ]
        router = self.router_instance
        if router is not None:
            found += [("router", "http", router.port), ("router", "metrics", router.metrics_port)]
        return tuple(found)

    def release(self) -> None:
        """Give the ports back and remove the KV that the engines kept in files; after the processes have ended."""
        for folder in {i.shared_dir for i in self.instances if i.shared_dir is not None}:
            shutil.rmtree(folder, ignore_errors=True)
        for lease in self.leases:
            self.registry.release(lease)


def plan_launch(
    topology: Topology,
    engine: Engine,
    router: Router | None,
    *,
    placement: Mapping[str, tuple[str, ...]],
    model: str,
    served_model: str,
    programs: Programs,
    log_dir: Path,
    run_id: str,
    ports: PortRegistry,
    extra_args: Mapping[str, FlagValue] | None = None,
    role_args: Mapping[str, Mapping[str, FlagValue]] | None = None,
    numa: Mapping[str, int] | None = None,
    client_processes: int = 1,
    launcher: Launcher = LOCAL,
) -> LaunchPlan:
    """Turn a topology into command lines. Starts nothing; reserves ports, which the plan then holds.

    `placement` maps instance ids to device strings, `numa` to NUMA nodes. Arguments merge in the order
    engine_args, the role's args, `extra_args`, `role_args[role]`; later wins. `router=None` is for one
    aggregated server alone. `launcher` says on which host each will listen, `client_processes` how many cores the
    load client would like. Raises UsageProblem for what is known to fail: missing programs and models, wrong
    placement, ports in use.
    """
    if router is None and (topology.kind is Kind.PD or len(topology.instances) > 1):
        raise UsageProblem(f"{topology.name}: {len(topology.instances)} engines need a router in front")
    unknown = sorted(set(role_args or {}) - {role.value for role in topology.roles})
    if unknown:
        known = ", ".join(role.value for role in topology.roles)
        raise UsageProblem(
            f"{topology.name}: arguments for role {unknown[0]!r}, which it lacks (it has {known})"
        )
    devices = tuple(dict.fromkeys(d for id, _, _ in topology.instances for d in placement.get(id, ())))
    engine.check(programs, topology, devices)
    if router is not None:
        router.check(programs)
    if not engine.simulated:
        check_model(model)

    taken: list[PortLease] = []
    log_dir = _fresh(log_dir)
    kv = topology.kv_transfer
    shared_dir = (log_dir / _SHARED).absolute() if kv is not None and kv.connector == "example" else None
    try:
        instances = tuple(
            _instance(
                topology,
                (id, role, spec),
                devices=placement.get(id, ()),
                model=model,
                served_model=served_model,
                args=_merged(topology.engine_args, spec.args, extra_args, (role_args or {}).get(role.value)),
                ports=_ports(topology, id, role, spec, ports, taken),
                numa_node=(numa or {}).get(id),
                simulated=engine.simulated,
                shared_dir=shared_dir,
                host=launcher.host(id),
            )
            for id, role, spec in topology.instances
        )
        commands = {i.id: engine.command(i, programs) for i in instances}
        router_instance = None
        if router is not None:
            router_instance = _router(topology, instances, ports, taken, launcher.host("router"))
            commands["router"] = router.command(router_instance, programs)
    except BaseException:
        for lease in taken:
            ports.release(lease)
        raise
    cpus = {i.id: node_cpus(i.numa_node) for i in instances if i.numa_node is not None}
    return LaunchPlan(
        run_id=run_id,
        topology=topology,
        engine=engine,
        router=router,
        instances=instances,
        commands=commands,
        router_instance=router_instance,
        served_model=served_model,
        log_dir=log_dir,
        registry=ports,
        leases=tuple(taken),
        warnings=_mismatches(topology, instances),
        client=client_cores(
            {id: found for id, found in cpus.items() if found},
            os.sched_getaffinity(0),
            unbound=[i.id for i in instances if not cpus.get(i.id)],
            wanted=client_processes,
        ),
        launcher=launcher,
    )


def check_model(model: str) -> None:
    """Raise UsageProblem for a model that cannot be loaded without a network: engines are started offline."""
    path = Path(model).expanduser()
    looks_like_path = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1
    if path.exists():
        if path.is_dir() and not (path / "config.json").is_file():
            raise UsageProblem(
                f"model {model}: the directory has no config.json; name a directory of a saved model"
            )
        return
    if looks_like_path:
        raise UsageProblem(f"model {model}: no such file or directory")
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    if not (hub / f"models--{model.replace('/', '--')}").is_dir():
        raise UsageProblem(
            f"model {model!r} is neither a directory nor in the model cache {hub}; engines start offline, "
            f"so fetch it first (hf download {model}) or name a directory"
        )


def node_cpus(node: int | None, root: Path = Path("/sys/devices/system/node")) -> tuple[int, ...]:
    """CPUs of a NUMA node that this process may use; empty when that is unknown."""
    try:
        text = (root / f"node{node}" / "cpulist").read_text().strip()
    except OSError:
        return ()
    return tuple(sorted(parse_cores(text) & os.sched_getaffinity(0)))


def _fresh(folder: Path) -> Path:
    """`folder`, or one below it when it holds logs already: a relaunch must not erase why the last one died."""
    number, found = 1, folder
    while any(found.glob("*.log")):
        number += 1
        found = folder / f"launch-{number}"
    return found


def _mismatches(topology: Topology, instances: Sequence[Instance]) -> tuple[str, ...]:
    """Arguments that decide how KV blocks look and differ between the roles: engines may not notice."""
    if topology.kind is not Kind.PD:
        return ()
    out = []
    for key in _KV_LAYOUT:
        values = {i.role.value: str(i.args.get(key, "default")) for i in instances}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{role} {value}" for role, value in values.items())
            out.append(
                f"{key} differs between the roles ({shown}): KV blocks may be misread without an error"
            )
    return tuple(out)


def _merged(*layers: Mapping[str, FlagValue] | None) -> dict[str, FlagValue]:
    out: dict[str, FlagValue] = {}
    for layer in layers:
        for key, value in (layer or {}).items():
            name = key.lstrip("-").replace("-", "_")
            out.pop(name, None)
            out[name] = value
    return out


def _ports(
    topology: Topology, id: str, role: Role, spec: RoleSpec, ports: PortRegistry, taken: list[PortLease]
) -> Ports:
    def take(kind: str, count: int = 1) -> int:
        lease = ports.reserve(f"{topology.name} {id} {kind}", count)
        taken.append(lease)
        return lease.first

    pd = topology.kind is Kind.PD
    return Ports(
        http=take("http"),
        side_channel=take("side channel", spec.tensor_parallel) if pd else 0,
        bootstrap=take("bootstrap") if role is Role.PREFILL else 0,
        dist_init=take("rendezvous", _DIST_PORTS),
    )


def _instance(
    topology: Topology,
    which: tuple[str, Role, RoleSpec],
    *,
    devices: Sequence[str],
    model: str,
    served_model: str,
    args: Mapping[str, FlagValue],
    ports: Ports,
    numa_node: int | None,
    simulated: bool,
    shared_dir: Path | None,
    host: str,
) -> Instance:
    id, role, spec = which
    devices = tuple(devices)
    if not simulated and devices != ("cpu",) and len(devices) != spec.tensor_parallel:
        raise UsageProblem(
            f"{topology.name}: {id} needs {spec.tensor_parallel} device(s), placement gives {len(devices)}"
            f"{': ' + ','.join(devices) if devices else ''}"
        )
    return Instance(
        id=id,
        role=role,
        ports=ports,
        devices=devices,
        tensor_parallel=spec.tensor_parallel,
        model=model,
        served_model=served_model,
        args=args,
        env={**topology.env, **spec.env},
        kv_transfer=topology.kv_transfer,
        numa_node=numa_node,
        shared_dir=shared_dir,
        host=host,
    )


def _router(
    topology: Topology,
    instances: tuple[Instance, ...],
    ports: PortRegistry,
    taken: list[PortLease],
    host: str,
) -> RouterInstance:
    label = f"{topology.name} router"
    wanted = topology.router.port
    taken.append(ports.reserve_fixed(f"{label} http", wanted) if wanted else ports.reserve(f"{label} http"))
    port = taken[-1].first
    taken.append(ports.reserve(f"{label} metrics"))
    return RouterInstance(
        spec=topology.router,
        kind=topology.kind,
        port=port,
        metrics_port=taken[-1].first,
        workers=instances,
        kv_transfer=topology.kv_transfer,
        host=host,
    )
