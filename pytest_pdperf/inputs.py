"""Everything a run is given, read and checked once: specs, engine, programs, devices. Starts nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from .engines.base import Engine, Programs
from .engines.foreign import ForeignEngine
from .engines.registry import get_engine
from .engines.sim.faults import Faults
from .errors import UsageProblem
from .gate.paired import Expectation, load_expectations
from .gpus.grammar import GpuRequest, parse_gpus, resolve
from .gpus.inventory import Inventory, load_recorded
from .gpus.nvml import read_inventory
from .measure.table import METRICS
from .options import BY_NAME, Settings
from .places.deployment import Deployment, look
from .places.found import explained, named_in
from .places.kubernetes import Cluster, read_wanted
from .places.named import read_named, topology_of, without_k8s, without_target
from .routers.base import Router
from .routers.registry import get_router
from .spec.fit import misfit
from .spec.loader import find_topologies, find_workload, load_tolerances, shipped_fixtures
from .spec.tolerances import Tolerances
from .spec.topology import FlagValue, Role, Topology
from .spec.workload import Workload

ROLES = tuple(role.value for role in Role)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The validated input of a run."""

    topologies: tuple[Topology, ...]
    workload: Workload
    tolerances: Tolerances
    engines: Mapping[str, Engine]
    """Topology name -> its engine."""
    routers: Mapping[str, Router]
    programs: Programs
    reference_programs: Programs | None
    """Where `--reference` points; None without it."""
    model: str
    served_model: str
    gpus: GpuRequest | None
    """None for the simulator, unless it is to use virtual GPUs."""
    engine_args: Mapping[str, FlagValue]
    role_args: Mapping[str, Mapping[str, FlagValue]]
    expectations: tuple[Expectation, ...] = ()
    """Every claim of `expectations.yaml` about two topologies."""
    recorded: Inventory | None = None
    """The GPUs of `--gpu-inventory`, which are not there; None when the driver is to be asked."""
    deployment: Deployment | None = None
    """What `--target` or `--k8s` leads to; None where the run launches its own."""
    cluster: Cluster | None = None
    """Where `--k8s` found it. Holds port-forwards until it is closed."""

    @property
    def measured_gpus(self) -> GpuRequest | None:
        """The devices that numbers of this run are about: None for simulated engines, wherever they are placed."""
        return None if self.simulated else self.gpus

    @property
    def simulated(self) -> bool:
        """True when no number of this run is a measurement. Topology files name engines too, so the engines are asked.

        Simulated and real engines never share a run.
        """
        return any(engine.simulated for engine in self.engines.values())


def read_inputs(settings: Settings, root: Path) -> Inputs:
    """Read every file and option. Raises UsageProblem with place, value and way out."""
    folders = [
        folder for folder in (root / settings["pdperf_fixtures"], shipped_fixtures()) if folder.is_dir()
    ]
    if settings["k8s"]:
        cluster = Cluster(read_wanted(settings))
        try:
            with explained(cluster):
                return _attached_inputs(settings, folders, cluster)
        except BaseException:
            cluster.close()
            raise
    without_k8s(settings)
    if settings["target"]:
        return _attached_inputs(settings, folders)
    without_target(settings)
    topologies = find_topologies(_names(settings["topology"], "--topology"), folders)
    for name in settings["compare"] or ():
        if name not in {topology.name for topology in topologies}:
            known = ", ".join(topology.name for topology in topologies)
            raise UsageProblem(
                f"--compare: topology {name!r} is not in this run, which has {known}; see --topology"
            )
    engines = {t.name: get_engine(settings["engine"] or t.engine or "vllm") for t in topologies}
    simulated = _all_simulated(engines.values())
    recorded = _recorded(settings, simulated)
    gpus = _gpus(settings, simulated, recorded)
    measured = None if simulated else gpus
    workload = find_workload(settings["workload"] or _usual_workload(settings, measured), folders)
    routers = {t.name: get_router(t.router.name or engines[t.name].default_router) for t in topologies}
    engine_args, role_args = _engine_args(settings["engine_arg"])
    if settings["sim_fault"]:
        if not all(engine.simulated for engine in engines.values()):
            raise UsageProblem("--sim-fault works on simulated engines only: add --engine sim")
        _add_faults(settings["sim_fault"], role_args)
    model = settings["model"] or _usual_model(settings, measured)
    for topology in topologies:
        limit = engines[topology.name].longest_context(model)
        check_context(topology, workload, engine_args, role_args, limit)
    return Inputs(
        topologies=topologies,
        workload=workload,
        tolerances=_tolerances(folders),
        expectations=_expectations(folders),
        engines=engines,
        routers=routers,
        programs=_programs(settings["engine_env"], "--engine-env"),
        reference_programs=(
            _programs(settings["reference"], "--reference") if settings["reference"] else None
        ),
        model=model,
        served_model=settings["served_model"] or Path(model).name or model,
        gpus=gpus,
        engine_args=engine_args,
        role_args=role_args,
        recorded=recorded,
    )


def _attached_inputs(settings: Settings, folders: Sequence[Path], cluster: Cluster | None = None) -> Inputs:
    """Inputs of a run that launches nothing. Asks the target, but sends it no request for tokens."""
    named = named_in(cluster, settings) if cluster is not None else read_named(settings)
    names = _names(settings["topology"], "--topology") if "topology" in settings.given else []
    if len(names) > 1:
        raise UsageProblem(f"--topology {settings['topology']}: a deployment behind --target is one topology")
    if settings["compare"]:
        raise UsageProblem("--compare needs two topologies, a deployment behind --target is one")
    topology = topology_of(named, find_topologies(names, folders)[0] if names else None)
    model, served = settings["model"], settings["served_model"]
    wanted = (served,) if served else (model, Path(model).name) if model else ()
    deployment = look(named, wanted, settings["engine"] or topology.engine)
    usual = "quick" if deployment.simulated else "fixed-shapes"
    workload = find_workload(settings["workload"] or usual, folders)
    limit = {"max_model_len": deployment.max_context} if deployment.max_context else {}
    check_context(topology, workload, limit, {})
    return Inputs(
        topologies=(topology,),
        workload=workload,
        tolerances=_tolerances(folders),
        expectations=_expectations(folders),
        engines={topology.name: ForeignEngine(deployment.engine, deployment.simulated)},
        routers={},
        programs=Programs(()),
        reference_programs=None,
        model=deployment.model,
        served_model=deployment.model,
        gpus=None,
        engine_args={},
        role_args={},
        deployment=deployment,
        cluster=cluster,
    )


def _names(text: str, place: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UsageProblem(f"{place}: {text!r} has an empty name between its commas")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageProblem(f"{place}: {repeated[0]!r} is named twice")
    return names


def _all_simulated(engines: Iterable[Engine]) -> bool:
    simulated = {engine.simulated for engine in engines}
    if len(simulated) > 1:
        raise UsageProblem("--topology: simulated and real engines cannot share a run")
    return simulated == {True}


def _recorded(settings: Settings, simulated: bool) -> Inventory | None:
    if not settings["gpu_inventory"]:
        return None
    if not (simulated or settings["plan"]):
        raise UsageProblem(
            f"--gpu-inventory {settings['gpu_inventory']}: those GPUs are not here, so real engines can only be "
            "planned for them; add --plan or --engine sim"
        )
    return load_recorded(Path(settings["gpu_inventory"]))


def _gpus(settings: Settings, simulated: bool, recorded: Inventory | None) -> GpuRequest | None:
    if settings["launcher"] == "slurm":
        return _slurm_gpus(settings, simulated)
    for name in ("slurm_arg", "slurm_gres"):
        if name in settings.given:
            raise UsageProblem(f"{BY_NAME[name].flag} is for --launcher slurm; add it, or leave this out")
    if simulated and recorded is None:
        if settings["gpus"]:
            raise UsageProblem(
                f"--gpus {settings['gpus']}: simulated engines use no GPU; drop --gpus or --engine sim, "
                "or give virtual GPUs with --gpu-inventory"
            )
        return None
    if not settings["gpus"]:
        raise UsageProblem("--gpus is missing: give a list such as 0-7, or cpu, or use --engine sim")
    return parse_gpus(settings["gpus"])


def _slurm_gpus(settings: Settings, simulated: bool) -> GpuRequest | None:
    """Slurm hands out as many GPUs as the topology says, to simulated engines too: a rehearsal asks for the same."""
    for name in ("gpu_inventory", "overlap_start"):
        if settings[name]:
            raise UsageProblem(
                f"{BY_NAME[name].flag} has no meaning with --launcher slurm, which knows no GPU by name; leave it out"
            )
    request = parse_gpus(settings["gpus"] or "all")
    if not request.cpu and not request.everything:
        raise UsageProblem(
            f"--gpus {settings['gpus']}: with --launcher slurm Slurm chooses the GPUs; leave it out, or give cpu to "
            "ask for none"
        )
    return None if simulated else request


def _usual_workload(settings: Settings, gpus: GpuRequest | None) -> str:
    if gpus is None:
        return "quick"
    return "cpu-smoke" if gpus.cpu else "fixed-shapes"


def _usual_model(settings: Settings, gpus: GpuRequest | None) -> str:
    if gpus is None:
        return "fast"
    tiny = Path(settings["engine_env"] or "") / "tiny-qwen3"
    if gpus.cpu and settings["engine_env"] and tiny.is_dir():
        return str(tiny)
    if not gpus.cpu and not settings["gpu_inventory"] and settings["launcher"] != "slurm":
        resolve(
            gpus, read_inventory(), os.environ.get("CUDA_VISIBLE_DEVICES")
        )  # no model helps without a GPU
    raise UsageProblem("--model is missing: give the path or name of the model that the engine shall load")


def _programs(engine_env: str | None, place: str) -> Programs:
    search: list[Path] = []
    if engine_env:
        folder = Path(engine_env).expanduser().absolute()
        if not (folder / "bin").is_dir():
            raise UsageProblem(
                f"{place} {engine_env}: no virtual environment there ({folder / 'bin'} is missing)"
            )
        search.append(folder / "bin")
    search.append(Path(sys.executable).parent)
    path = os.environ.get("PATH") or os.defpath
    search += [Path(part) for part in path.split(os.pathsep) if part]
    return Programs(tuple(dict.fromkeys(search)))


def _engine_args(texts: Sequence[str]) -> tuple[dict[str, FlagValue], dict[str, dict[str, FlagValue]]]:
    """Split `KEY=VALUE` and `ROLE.KEY=VALUE`; values are read as YAML, so 4096, true and {a: 1} keep their types."""
    common: dict[str, FlagValue] = {}
    by_role: dict[str, dict[str, FlagValue]] = {}
    for text in texts:
        role, key, value = _role_key_value(text, "--engine-arg")
        try:
            parsed: FlagValue = yaml.safe_load(value) if value is not None else True
        except yaml.YAMLError:
            raise UsageProblem(f"--engine-arg {text!r}: {value!r} is no YAML value; quote it") from None
        (by_role.setdefault(role, {}) if role else common)[key.replace("-", "_")] = parsed
    return common, by_role


def _add_faults(texts: Sequence[str], role_args: dict[str, dict[str, FlagValue]]) -> None:
    for text in texts:
        role, key, value = _role_key_value(text, "--sim-fault")
        fault = key if value is None else f"{key}={value}"
        Faults.parse(fault, f"--sim-fault {text!r}")
        for name in [role] if role else ROLES:
            args = role_args.setdefault(name, {})
            args["faults"] = f"{args['faults']},{fault}" if "faults" in args else fault


def _role_key_value(text: str, place: str) -> tuple[str, str, str | None]:
    name, separator, value = text.partition("=")
    role, dot, key = name.rpartition(".")
    if not (key or role) or (dot and role not in ROLES) or not name.strip():
        raise UsageProblem(
            f"{place} {text!r}: want KEY=VALUE or ROLE.KEY=VALUE with a role of {', '.join(ROLES)}"
        )
    return role, key.strip().lstrip("-"), value if separator else None


def _expectations(folders: Sequence[Path]) -> tuple[Expectation, ...]:
    path = next((f for folder in folders if (f := folder / "expectations.yaml").is_file()), None)
    return load_expectations(path, METRICS) if path is not None else ()


def _tolerances(folders: Sequence[Path]) -> Tolerances:
    for folder in folders:
        path = folder / "tolerances.yaml"
        if path.is_file():
            return load_tolerances(path)
    return Tolerances()


def check_context(
    topology: Topology,
    workload: Workload,
    engine_args: Mapping[str, FlagValue],
    role_args: Mapping[str, Mapping[str, FlagValue]],
    model_limit: int | None = None,
) -> None:
    """Refuse cells that cannot fit the engine's context before anything starts. Raises UsageProblem."""
    roles = {
        role: spec.model_copy(update={"args": {**spec.args, **role_args.get(role.value, {})}})
        for role, spec in topology.roles.items()
    }
    asked = topology.model_copy(
        update={"engine_args": {**topology.engine_args, **engine_args}, "roles": roles}
    )
    for cell in workload.cells:
        if why := misfit(asked, cell, model_limit):
            way = f"--engine-arg max_model_len={cell.max_context}"
            raise UsageProblem(f"workload {workload.name}: {why} ({way}), or choose another --workload")


def without_faults(role_args: Mapping[str, Mapping[str, FlagValue]]) -> dict[str, dict[str, FlagValue]]:
    """Arguments of the reference build: `--sim-fault` is what the build under test is suspected of."""
    return {
        role: {key: value for key, value in args.items() if key != "faults"}
        for role, args in role_args.items()
    }
