"""The simulated engine behind the `Engine` interface: a timing model in real processes, for where no GPU is."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence

from pytest_pdperf.engines.base import Command, Instance, Programs
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.topology import FlagValue, Role, Topology

from .profile import PROFILES

DEFAULT_PROFILE = "fast"

_FLAGS: Mapping[str, str] = {
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "num_gpu_blocks_override": "--num-gpu-blocks",
    "kv_load_failure_policy": "--kv-load-failure-policy",
    "kv_lease_s": "--kv-lease-s",
    "faults": "--faults",
    "seed": "--seed",
}
"""Engine arguments with a meaning here. Others are for real engines: they are logged and ignored."""


_NUMBERS: Mapping[str, type[int] | type[float]] = {
    "max_model_len": int,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "num_gpu_blocks_override": int,
    "kv_lease_s": float,
}
"""Those of them that are numbers, all above 0."""


class SimEngine:
    """Starts `python -m pytest_pdperf.engines.sim.server`; everything it measures is SIMULATED."""

    name = "sim"
    default_router = "vllm_router"
    simulated = True
    stages: Mapping[str, str] = {
        "SIMULATED engine": "starting",
        "Starting to load model": "loading weights",
        "Starting vLLM server": "opening port",
        "Application startup complete.": "ready",
    }
    """What a log line has in it -> the start-up stage that it opens."""

    def check(self, programs: Programs, topology: Topology, devices: Sequence[str]) -> None:
        """Raise UsageProblem for a fault that the simulator does not have."""
        from .faults import Faults

        places = {"engine_args": topology.engine_args}
        places |= {f"roles.{role.value}.args": spec.args for role, spec in topology.roles.items()}
        for place, args in places.items():
            where = f"topology {topology.name!r}: {place}.faults"
            if (text := args.get("faults")) is not None:
                if not isinstance(text, str):
                    raise UsageProblem(f"{where}: expected text such as 'decode_step=1.15', got {text!r}")
                Faults.parse(text, where)
            for key in args:
                _refuse_misspelt(f"topology {topology.name!r}: {place}", key)

    def command(self, instance: Instance, programs: Programs) -> Command:
        """One engine process; `instance.model` names the timing profile."""
        argv = [
            *(sys.executable, "-m", "pytest_pdperf.engines.sim.server"),
            *("--role", instance.role.value),
            *("--host", instance.host),
            *("--port", str(instance.ports.http)),
            *("--served-model-name", instance.served_model),
            *("--profile", instance.model or DEFAULT_PROFILE),
            *("--tensor-parallel-size", str(instance.tensor_parallel)),
        ]
        if instance.role is Role.PREFILL:
            argv += ["--side-channel-port", str(instance.ports.side_channel)]
        if (kv := instance.kv_transfer) is not None:
            argv += ["--kv-transport", kv.transport]
            if kv.connector != "nixl":
                argv += ["--kv-connector", kv.connector]
            if kv.connector == "mooncake" and instance.role is Role.PREFILL:
                argv += ["--bootstrap-port", str(instance.ports.bootstrap)]
            if kv.connector == "example" and instance.shared_dir is not None:
                argv += ["--shared-storage-path", str(instance.shared_dir)]
        ignored: list[str] = []
        seed = str(instance.args.get("seed", 0))
        for key, value in instance.args.items():
            name = key.lstrip("-").replace("-", "_")
            if name == "seed" or value is None:
                continue
            if name in _FLAGS:
                text = _text(value)
                _refuse_no_number(f"arguments of {instance.id}", name, value)
                argv += [_FLAGS[name], text]
            else:
                _refuse_misspelt(f"arguments of {instance.id}", name)
                ignored.append(name)
        argv += ["--seed", f"{seed} {instance.id}"]
        if ignored:
            argv += ["--ignored", ",".join(sorted(ignored))]
        return Command(tuple(argv), dict(instance.env))

    def stage(self, line: str) -> str | None:
        """Name of the start-up stage that this log line opens."""
        for text, stage in self.stages.items():
            if text in line:
                return stage
        return None

    def root_cause(self, lines: Sequence[str]) -> str | None:
        """The first ERROR line or refused argument, else the last line of a traceback."""
        for line in lines:
            if " ERROR " in line or ": error: " in line:
                return line.strip()
        for i, line in enumerate(lines):
            if "Traceback (most recent call last)" in line:
                later = [text.strip() for text in lines[i:] if text.strip()]
                return later[-1]
        return None

    def version(self, programs: Programs) -> str:
        """Version of the simulator."""
        from .profile import VERSION

        return VERSION

    def longest_context(self, model: str) -> int | None:
        """That of the timing profile, by whose name a model goes here."""
        return PROFILES[model].max_model_len if model in PROFILES else None

    def supported_prompts(self) -> frozenset[str]:
        """Token ids, and text of one token a word."""
        return frozenset({"token_ids", "text"})


def _refuse_misspelt(place: str, key: str) -> None:
    """Arguments of real engines are ignored; one that nearly is an argument of this one is a mistake."""
    near = difflib.get_close_matches(key, _FLAGS, n=1, cutoff=0.85)
    if near and key not in _FLAGS:
        raise UsageProblem(f"{place}: unknown {key!r}, did you mean {near[0]!r}?")


def _refuse_no_number(place: str, name: str, value: FlagValue) -> None:
    kind = _NUMBERS.get(name)
    fits = int if kind is int else (int, float)
    if kind is not None and (isinstance(value, bool) or not isinstance(value, fits) or value <= 0):
        what = "a whole number" if kind is int else "a number"
        raise UsageProblem(f"{place}: {name} is {value!r}, want {what} above 0, such as {name}=4096")


def _text(value: FlagValue) -> str:
    if isinstance(value, dict | list):
        raise UsageProblem(f"simulated engine: expected one value, got {value!r}")
    return str(value)


ENGINE = SimEngine()
