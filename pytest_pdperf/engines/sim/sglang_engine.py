"""The simulated engine that speaks SGLang's protocol, behind the `Engine` interface: real routers, no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pytest_pdperf.engines.base import Command, Instance, Programs
from pytest_pdperf.engines.sglang import SAME_MEANING
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.topology import FlagValue, KvTransfer, Topology

from .engine import SimEngine

MODULE = "pytest_pdperf.engines.sim.sglang_server"

_CONNECTORS = ("nixl", "mooncake")
_OWN = {"incremental_streaming_output", "metrics_form"}
_COMMON = {theirs: common for common, theirs in SAME_MEANING.items()}


class SimSglang(SimEngine):
    """Starts `python -m pytest_pdperf.engines.sim.sglang_server`; everything it measures is SIMULATED.

    Beyond the simulator's arguments it takes SGLang's names for them, `incremental_streaming_output` (events of
    `/generate` hold what is new) and `metrics_form: old` (what SGLang printed before 0.5.10).
    """

    name = "sim-sglang"
    default_router = "sglang_router"
    stages: Mapping[str, str] = {
        "SIMULATED engine": "starting",
        "Load weight begin": "loading weights",
        "Uvicorn running on": "opening port",
        "fired up and ready to roll": "ready",
    }

    def check(self, programs: Programs, topology: Topology, devices: Sequence[str]) -> None:
        """Raise UsageProblem for a connector or a fault that this simulation does not have."""
        kv = topology.kv_transfer
        if kv is not None and kv.connector not in _CONNECTORS:
            raise UsageProblem(
                f"topology {topology.name!r}: kv_transfer.connector {kv.connector!r} is not simulated; use "
                + " or ".join(map(repr, _CONNECTORS))
            )
        super().check(programs, topology, devices)
        _refuse_recompute(f"topology {topology.name!r}: engine_args", topology.engine_args)
        for role, spec in topology.roles.items():
            _refuse_recompute(f"topology {topology.name!r}: roles.{role.value}.args", spec.args)

    def command(self, instance: Instance, programs: Programs) -> Command:
        """One engine process; `instance.model` names the timing profile. Raises UsageProblem for a fault it lacks."""
        args: dict[str, FlagValue] = {}
        for key, value in instance.args.items():
            name = key.lstrip("-").replace("-", "_")
            args[_COMMON.get(name, name)] = value
        _refuse_recompute(f"arguments of {instance.id}", args)
        kv = instance.kv_transfer
        common = super().command(
            replace(
                instance,
                ports=replace(instance.ports, side_channel=instance.ports.bootstrap),
                args={key: value for key, value in args.items() if key not in _OWN},
                kv_transfer=kv and KvTransfer(transport=kv.transport),
            ),
            programs,
        )
        argv = list(common.argv)
        argv[2] = MODULE
        if args.get("incremental_streaming_output") is True:
            argv.append("--incremental-streaming-output")
        if args.get("metrics_form") is not None:
            argv += ["--metrics-form", str(args["metrics_form"])]
        return replace(common, argv=tuple(argv))

    def root_cause(self, lines: Sequence[str]) -> str | None:
        """The first ERROR line, else the last line of a traceback."""
        for line in lines:
            if "] ERROR: " in line:
                return line.strip()
        return super().root_cause(lines)

    def supported_prompts(self) -> frozenset[str]:
        """Token ids on `/generate`, and text of one token a word."""
        return frozenset({"generate_ids", "text"})


def _refuse_recompute(place: str, args: Mapping[str, FlagValue]) -> None:
    if "recompute" in str(args.get("faults") or ""):
        raise UsageProblem(f"{place}.faults: SGLang's decode role cannot compute prompts; drop 'recompute'")


ENGINE = SimSglang()
