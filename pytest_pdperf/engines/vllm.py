"""vLLM: command lines for GPU and CPU, and what its start-up log means."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_pdperf.engines.base import Command, Instance, Programs
from pytest_pdperf.engines.installed import version_of
from pytest_pdperf.engines.known_flags import has_word, refuse_unknown, sources
from pytest_pdperf.engines.model_config import longest_context
from pytest_pdperf.engines.ucx import UCX_ENV, UCX_READ_BACK
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.topology import FlagValue, KvTransfer, Role, Topology

_OWNED = {
    "model": "--model",
    "host": "the launcher",
    "port": "the launcher",
    "served_model_name": "the launcher",
    "tensor_parallel_size": "roles.<role>.tensor_parallel",
    "kv_role": "the role",
}
"""Arguments that have one owner already -> who it is."""

_PARALLEL = frozenset({"data_parallel_size", "pipeline_parallel_size"})
"""Arguments that would take GPUs which placement does not hand out."""

_CONNECTORS = {"nixl": "NixlConnector", "mooncake": "MooncakeConnector", "example": "ExampleConnector"}

_WRITTEN_FOR = "vllm 0.26 to 0.32"
_FLAG_SOURCES = ("vllm/engine/arg_utils.py", "vllm/entrypoints/**/cli_args.py")
_CONNECTOR_SOURCES = ("vllm/distributed/kv_transfer/kv_connector/factory.py",)

_PROTOCOLS = {"tcp": "tcp", "rdma": "rdma"}
"""Transport -> what Mooncake is asked for; without RDMA hardware it takes TCP and says so in its log only."""

_CPU_ENV: dict[str, str | None] = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Without this pair (see `uni` below) both sides of a worker pipe spin for a second after each message.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Wins over --kv-cache-memory-bytes when set, in whole GiB.
    "VLLM_CPU_KVCACHE_SPACE": None,
    "CUDA_VISIBLE_DEVICES": "",
}

_CPU_ARGS: dict[str, FlagValue] = {
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
    "kv_cache_memory_bytes": 128 * 2**20,
    "enable_log_requests": False,
}

_STAGES = (
    (re.compile(r"Starting vLLM server on|Application startup complete"), "serving"),
    (re.compile(r"[Gg]raph captur|Capturing CUDA graph"), "capturing graphs"),
    (re.compile(r"torch\.compile cache|Dynamo bytecode transform|Compiling a graph"), "torch.compile"),
    (re.compile(r"Initial profiling/warmup|Available KV cache memory|KV cache size:"), "profiling memory"),
    (
        re.compile(r"Initializing NIXL wrapper|Registering KV_Caches|Mooncake.*[Ii]nitial"),
        "setting up KV transfer",
    ),
    (
        re.compile(r"Loading model from scratch|Starting to load model|Loading (weights|safetensors)"),
        "loading weights",
    ),
    (re.compile(r"Initializing a V1 LLM engine|world_size=\d+ rank="), "starting engine core"),
    (re.compile(r"non-default args:|Resolved architecture"), "reading configuration"),
)

_PREFIX = re.compile(
    r"^(?:\((?P<source>[^()]* pid=\d+)\) ?)?(?:(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?"
)
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Fault|Warning)?: .+")
_NAMED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?::|$)")
_WRAPPER = re.compile(
    r"Engine core initialization failed|See root cause above|See stack trace for root cause"
    r"|WorkerProc initialization failed|EngineDeadError|EngineCore encountered an issue"
    r"|Engine process failed to start|cancelled|BrokenPipeError|EOFError$"
)
_HEADLINES = ("Config", "Args", "Params")
"""Ends of pydantic's `1 validation error for ModelConfig`: the reason is in the indented line below."""
_CHAIN = re.compile(r"During handling of the above exception|direct cause of the following exception")
_PLAIN = re.compile(
    r"error: (?:unrecognized arguments|argument |the following arguments|ambiguous option)"
    r"|CUDA out of memory|[Aa]ddress already in use|No space left on device|Cannot allocate memory"
    r"|No such file or directory|CUDA error|NCCL error|Segmentation fault|PackageNotFoundError"
    r"|pdperf: cannot start"
)


def flags(args: Mapping[str, FlagValue]) -> list[str]:
    """Topology arguments as vLLM's command line takes them: `enforce_eager: true` -> `--enforce-eager`.

    False becomes `--no-...`, None is left out, a list becomes several values, a mapping becomes JSON.
    """
    out: list[str] = []
    for key, value in args.items():
        name = key.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            out.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, dict):
            out += [f"--{name}", json.dumps(value, sort_keys=True, separators=(",", ":"))]
        elif isinstance(value, list):
            out += [f"--{name}", *(str(item) for item in value)]
        else:
            out += [f"--{name}", str(value)]
    return out


def _normal(args: Mapping[str, FlagValue]) -> dict[str, FlagValue]:
    return {key.lstrip("-").replace("-", "_"): value for key, value in args.items()}


def _refuse_owned(place: str, args: Mapping[str, FlagValue]) -> None:
    for key, value in _normal(args).items():
        if key in _OWNED:
            raise UsageProblem(f"{place}{key} is decided by {_OWNED[key]}; leave it out")
        if key in _PARALLEL and value not in (None, 1):
            raise UsageProblem(
                f"{place}{key} is {value!r}, but a role gets GPUs for tensor_parallel only; "
                "leave it out or use replicas"
            )


def _merge(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    out = dict(base)
    for key, value in over.items():
        mine = out.get(key)
        both = isinstance(mine, Mapping) and isinstance(value, Mapping)
        out[key] = _merge(mine, value) if both else value  # type: ignore[arg-type]
    return out


def kv_transfer_config(
    role: Role, kv: KvTransfer, *, cpu: bool, shared_dir: Path | None = None
) -> dict[str, object]:
    """The value of `--kv-transfer-config`; `shared_dir` is where the example connector keeps its files.

    A failed load must fail the request: vLLM's other policy recomputes the prompt on decode and hides the
    fault.
    """
    config: dict[str, object] = {
        "kv_connector": _CONNECTORS[kv.connector],
        "kv_role": "kv_producer" if role is Role.PREFILL else "kv_consumer",
    }
    if kv.connector == "nixl":
        config["kv_load_failure_policy"] = "fail"
        if cpu:
            config["kv_buffer_device"] = "cpu"
    if kv.connector == "mooncake" and (protocol := "tcp" if cpu else _PROTOCOLS.get(kv.transport)):
        config["kv_connector_extra_config"] = {"mooncake_protocol": protocol}
    if kv.connector == "example" and shared_dir is not None:
        config["kv_connector_extra_config"] = {"shared_storage_path": str(shared_dir)}
    return config


class Vllm:
    """vLLM's OpenAI server, started as `vllm serve`."""

    name = "vllm"
    default_router = "vllm_router"
    simulated = False

    def check(self, programs: Programs, topology: Topology, devices: Sequence[str]) -> None:
        """Raise UsageProblem for a missing program, an argument with another owner, what a CPU cannot do."""
        if programs.find("vllm") is None:
            where = ", ".join(str(p) for p in programs.search) or "nowhere"
            raise UsageProblem(
                f"engine 'vllm': no program vllm in {where}; pip install 'pytest-pdperf[vllm]', "
                "or --engine-env with an environment that has it, or --engine sim for simulated engines"
            )
        places = [("engine_args", topology.engine_args)]
        places += [(f"roles.{role.value}.args", spec.args) for role, spec in topology.roles.items()]
        for place, args in places:
            _refuse_owned(f"{topology.name}: {place}.", args)
        cpu = tuple(devices) == ("cpu",)
        if cpu:
            for role, spec in topology.roles.items():
                if spec.tensor_parallel > 1:
                    raise UsageProblem(
                        f"{topology.name}: roles.{role.value}.tensor_parallel is {spec.tensor_parallel}, "
                        "but on a CPU vLLM runs with 1 only; choose a topology without tensor parallelism"
                    )
        kv = topology.kv_transfer
        if kv is not None:
            files = sources(programs.find("vllm"), _CONNECTOR_SOURCES)
            if not has_word(files, name := _CONNECTORS[kv.connector]):
                raise UsageProblem(
                    f"{topology.name}: kv_transfer.connector is {kv.connector!r}, but vllm {self.version(programs)} "
                    f"has no {name}; this suite is written for {_WRITTEN_FOR}: install one of those (--engine-env)"
                )
        if cpu and kv is not None and kv.transport not in ("auto", "tcp"):
            raise UsageProblem(
                f"{topology.name}: kv_transfer.transport is {kv.transport!r}, but on a CPU only 'auto' "
                "and 'tcp' work"
            )
        if kv is not None and (kv.connector, kv.transport) == ("mooncake", "nvlink"):
            raise UsageProblem(
                f"{topology.name}: kv_transfer.transport 'nvlink' is set up for connector 'nixl' only; use that, or "
                "transport: auto with engine_args: {kv_transfer_config: {kv_connector_extra_config: "
                "{mooncake_protocol: nvlink_intra}}} on a Mooncake that is built for it"
            )

    def command(self, instance: Instance, programs: Programs) -> Command:
        """The command line and environment of one role."""
        program = programs.find("vllm")
        cpu = instance.devices == ("cpu",)
        args: dict[str, FlagValue] = dict(_CPU_ARGS) if cpu else {}
        args["enable_prefix_caching"] = False
        _refuse_owned(f"arguments of {instance.id}: ", instance.args)
        args |= _normal(instance.args)
        config: dict[str, object] = {}
        if instance.kv_transfer is not None:
            config = kv_transfer_config(
                instance.role, instance.kv_transfer, cpu=cpu, shared_dir=instance.shared_dir
            )
        extra = args.pop("kv_transfer_config", None)
        if isinstance(extra, Mapping):
            config = _merge(config, extra)
        argv = [str(program) if program else "vllm", "serve", instance.model]
        argv += ["--served-model-name", instance.served_model]
        argv += ["--host", instance.host, "--port", str(instance.ports.http)]
        if instance.tensor_parallel > 1:
            argv += ["--tensor-parallel-size", str(instance.tensor_parallel)]
        argv += flags(args)
        if config:
            argv += ["--kv-transfer-config", json.dumps(config, sort_keys=True, separators=(",", ":"))]
        refuse_unknown(
            sources(program, _FLAG_SOURCES),
            argv,
            _normal(instance.args),
            place=f"arguments of {instance.id}: ",
            engine=f"vllm {self.version(programs)}",
            written_for=_WRITTEN_FOR,
            help="vllm serve --help=all",
        )
        return Command(tuple(argv), self._environment(instance, cpu=cpu))

    def _environment(self, instance: Instance, *, cpu: bool) -> dict[str, str | None]:
        env: dict[str, str | None] = {
            "VLLM_HOST_IP": instance.host,
            # Kubernetes sets it to a URL for any service called vllm, and vLLM takes it for a port number.
            "VLLM_PORT": None,
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }
        if cpu:
            env |= _CPU_ENV
        else:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(instance.devices)
            if all(device.isdigit() for device in instance.devices):
                # Indices come from NVML, which counts by PCI address; CUDA on its own counts fastest first.
                env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        kv = instance.kv_transfer
        if kv is not None and kv.connector == "nixl":
            env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = instance.host
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(instance.ports.side_channel)
            env |= _ucx_on_cpu(instance.host) if cpu else UCX_ENV[kv.transport]
            env |= UCX_READ_BACK
        if kv is not None and kv.connector == "mooncake":
            if instance.role is Role.PREFILL:
                env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(instance.ports.bootstrap)
            if cpu or kv.transport == "tcp":
                env["MC_FORCE_TCP"] = "1"
        return env | dict(instance.env)

    def stage(self, line: str) -> str | None:
        """Name of the start-up stage that this log line opens, or None."""
        for pattern, name in _STAGES:
            if pattern.search(line):
                return name
        return None

    def root_cause(self, lines: Sequence[str]) -> str | None:
        """The one log line that explains a death, or None when nothing stands out.

        vLLM wraps a failure once per process on the way up; the wrappers say only `see root cause above`. The first
        traceback that ends in something else is the cause; in a chain ("During handling of ...") it is the chain's
        last exception. Lines of several processes interleave, so tracebacks are followed per process. Tracebacks
        logged below ERROR are optional imports that failed, not deaths.
        """
        cause: str | None = None
        where = ""
        open_tracebacks: set[str] = set()
        chained = False
        plain = named = wrapper = error = None
        for raw in lines:
            match = _PREFIX.match(raw)
            source = (match["source"] if match else None) or ""
            level = (match["level"] if match else None) or ""
            text = raw[match.end() :].rstrip() if match else raw.rstrip()
            if level in ("INFO", "WARNING", "DEBUG") or (cause is not None and source != where):
                continue
            if cause is not None and cause.endswith(_HEADLINES) and text[:1].isspace():
                cause = f"{cause}: {text.strip()}"
                continue
            wraps = _WRAPPER.search(text) is not None
            if text.startswith("Traceback (most recent call last)"):
                if cause is not None and not chained:
                    break
                open_tracebacks.add(source)
            elif source in open_tracebacks and text and not text[0].isspace():
                open_tracebacks.discard(source)
                chained = False
                if wraps:
                    wrapper = wrapper or text
                elif _EXCEPTION.match(text) or _NAMED.match(text):
                    cause, where = text, source
            elif _CHAIN.search(text):
                chained = True
            elif wraps or cause is not None:
                continue
            elif plain is None and _PLAIN.search(text):
                plain = text
            elif _NAMED.match(text):
                named = text
            elif level in ("ERROR", "CRITICAL", "FATAL") and text[:1].strip():
                error = text
        return cause or plain or named or wrapper or error

    def version(self, programs: Programs) -> str:
        """Version of the engine's distribution, read beside the program; `unknown` when it cannot be told."""
        return version_of(programs.find("vllm"), "vllm")

    def longest_context(self, model: str) -> int | None:
        """That of the model."""
        return longest_context(model)

    def supported_prompts(self) -> frozenset[str]:
        """`/v1/completions` takes both; there is no `/generate`."""
        return frozenset({"token_ids", "text"})


def _ucx_on_cpu(host: str) -> Mapping[str, str]:
    """TCP, within this machine over loopback alone: UCX would otherwise try every interface."""
    loopback = {"UCX_NET_DEVICES": "lo"} if host == "127.0.0.1" else {}
    return {"UCX_TLS": "tcp,sm,self", **loopback}


ENGINE = Vllm()
