"""SGLang: command lines of prefill, decode and aggregated servers, and what its start-up log means.

GPUs are handed over in CUDA_VISIBLE_DEVICES, in the very strings that placement gives, and `--base-gpu-id` is never
passed. SGLang counts its GPU ids within the visible ones, so ids 0, 1, ... are this engine's and nobody else's. A base
id would have to be counted in the parent's variable, would need neighbouring GPUs, and SGLang also indexes its
`--numa-node` list by it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_pdperf.engines.base import Command, Instance, Programs
from pytest_pdperf.engines.installed import version_of
from pytest_pdperf.engines.known_flags import refuse_unknown, sources
from pytest_pdperf.engines.model_config import longest_context
from pytest_pdperf.engines.ucx import UCX_ENV, UCX_READ_BACK
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.topology import FlagValue, Role, Topology

SAME_MEANING: Mapping[str, str] = {
    "max_model_len": "context_length",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "gpu_memory_utilization": "mem_fraction_static",
    "block_size": "page_size",
    "enforce_eager": "disable_cuda_graph",
    "seed": "random_seed",
    "tokenizer": "tokenizer_path",
}
"""The one table of names: what a topology file may say -> SGLang's own name, which works as well.

`dtype`, `kv_cache_dtype`, `quantization`, `load_format`, `revision` and `trust_remote_code` are the same in both.
Two are near, not equal: `mem_fraction_static` leaves CUDA graphs and activations outside its share, and
`chunked_prefill_size` bounds the prompt tokens of a step, not all of its tokens.
`enable_prefix_caching` is the opposite of `disable_radix_cache`, which is on unless asked otherwise.
"""

_OWNED = {
    "model": "--model",
    "model_path": "--model",
    "host": "the launcher",
    "port": "the launcher",
    "nccl_port": "the launcher",
    "served_model_name": "the launcher",
    "tensor_parallel_size": "roles.<role>.tensor_parallel",
    "tp_size": "roles.<role>.tensor_parallel",
    "base_gpu_id": "placement",
    "gpu_id_step": "placement",
    "numa_node": "placement",
    "disaggregation_mode": "the role",
    "disaggregation_transfer_backend": "kv_transfer.connector",
    "disaggregation_bootstrap_port": "the launcher",
    "nnodes": "the launcher",
    "node_rank": "the launcher",
}
"""Arguments that have one owner already -> who it is."""

_PARALLEL = {
    "dp_size": "data_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
}
"""Arguments that would take GPUs which placement does not hand out."""

_FOREIGN = {
    "speculative_config": "speculative_algorithm, speculative_draft_model_path, speculative_num_steps, ...",
    "kv_transfer_config": "kv_transfer: {connector, transport}",
    "hf_overrides": "json_model_override_args",
    "async_scheduling": "disable_overlap_schedule",
}
"""vLLM's arguments that no single value of SGLang's replaces -> what to write instead."""

_WRITTEN_FOR = "sglang 0.5.17"
_FLAG_SOURCES = ("sglang/srt/server_args.py",)

_BACKENDS = ("nixl", "mooncake")

_STAGES = (
    (re.compile(r"The server is fired up and ready to roll"), "serving"),
    (re.compile(r"Start of (?:pd )?disaggregation warmup|Uvicorn running on"), "built-in warm-up"),
    (
        re.compile(r"Initialized NIXL agent|KVManager initialized|Mooncake.*[Ii]nitial"),
        "setting up KV transfer",
    ),
    (re.compile(r"Capture .*[Cc][Uu][Dd][Aa] graph begin|Capturing batches"), "capturing graphs"),
    (re.compile(r"KV Cache is allocated|Memory pool end|KV cache is allocated"), "allocating KV cache"),
    (re.compile(r"Load weight begin|Loading safetensors|Multi-thread loading"), "loading weights"),
    (re.compile(r"Init torch distributed begin"), "starting schedulers"),
    (re.compile(r"server_args=ServerArgs"), "reading configuration"),
)

_PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: [A-Z]+\d+)*\] ?")
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Fault)(?::|$)|^Exception: ."
)
_WRAPPER = re.compile(
    r"Initialization failed\. Please see the error messages above|Received sigquit from a child process"
    r"|SIGQUIT received|Rank \d+ scheduler died during initialization|crashed with exit code -15"
    r"|SystemExit|KeyboardInterrupt|CancelledError|BrokenPipeError|^EOFError$|ProcessLookupError"
)
_DIED = re.compile(
    r"Rank \d+ scheduler died during initialization \(exit code: -?\d+\)|crashed with exit code -?\d+"
)
_PLAIN = re.compile(
    r"error: (?:unrecognized arguments|argument |the following arguments|ambiguous option)"
    r"|CUDA out of memory|[Aa]ddress already in use|Port is already in use|No space left on device"
    r"|Cannot allocate memory|No such file or directory|CUDA error|NCCL error|Segmentation fault"
    r"|PackageNotFoundError|No module named 'sglang|[Ww]atchdog timeout|Mooncake Transfer Engine initialization failed"
)
_HARMLESS = re.compile(
    r"Ignore import error|PRI %2A HTTP/2|Invalid HTTP request received|crashed with exit code -15"
)


def flags(args: Mapping[str, FlagValue]) -> list[str]:
    """Topology arguments as SGLang's command line takes them: `trust_remote_code: true` -> `--trust-remote-code`.

    SGLang's switches only switch on, so False is left out like None; a list becomes several values, a mapping JSON.
    """
    out: list[str] = []
    for key, value in args.items():
        name = f"--{key.replace('_', '-')}"
        if value is None or value is False:
            continue
        if value is True:
            out.append(name)
        elif isinstance(value, dict):
            out += [name, json.dumps(value, sort_keys=True, separators=(",", ":"))]
        elif isinstance(value, list):
            out += [name, *(str(item) for item in value)]
        else:
            out += [name, str(value)]
    return out


def sglang_args(args: Mapping[str, FlagValue]) -> dict[str, FlagValue]:
    """Arguments under SGLang's names, later ones winning over earlier ones of the same meaning.

    The prefix cache is off unless `enable_prefix_caching: true` or `disable_radix_cache: false` says otherwise: the
    suite measures prompts of full length.
    """
    out: dict[str, FlagValue] = {"disable_radix_cache": True}
    for key, value in _normal(args).items():
        if key == "enable_prefix_caching":
            out["disable_radix_cache"] = not value
        else:
            out[SAME_MEANING.get(key, key)] = value
    return out


def _normal(args: Mapping[str, FlagValue]) -> dict[str, FlagValue]:
    return {key.lstrip("-").replace("-", "_"): value for key, value in args.items()}


def _refuse(place: str, args: Mapping[str, FlagValue]) -> None:
    args = _normal(args)
    for key, value in args.items():
        if key in _OWNED:
            raise UsageProblem(f"{place}{key} is decided by {_OWNED[key]}; leave it out")
        if key in _FOREIGN:
            raise UsageProblem(f"{place}{key} is vLLM's; for SGLang write {_FOREIGN[key]}")
        if key in _PARALLEL and value not in (None, 1) and not _shares_gpus(key, args):
            raise UsageProblem(
                f"{place}{key} is {value!r}, but a role gets GPUs for tensor_parallel only; leave it out, use "
                "replicas, or set enable_dp_attention: true beside dp_size, which shares the GPUs of tensor_parallel"
            )


def _refuse_named_devices(instance: Instance) -> None:
    named = [device for device in instance.devices if not device.isdigit()]
    asked = _normal(instance.args).get("disable_custom_all_reduce") is True
    if instance.tensor_parallel > 1 and named and not asked:
        raise UsageProblem(
            f"{instance.id}: SGLang's all-reduce reads CUDA_VISIBLE_DEVICES as numbers and falls back to NCCL, with no "
            f"more than a warning, on {named[0]!r}; give GPUs by index, or say so: --engine-arg "
            "disable_custom_all_reduce=true"
        )


def _shares_gpus(key: str, args: Mapping[str, FlagValue]) -> bool:
    return _PARALLEL[key] == "data_parallel_size" and args.get("enable_dp_attention") is True


class Sglang:
    """SGLang's HTTP server, started as `sglang serve`, or as a module where there is no such program."""

    name = "sglang"
    default_router = "sglang_router"
    simulated = False

    def check(self, programs: Programs, topology: Topology, devices: Sequence[str]) -> None:
        """Raise UsageProblem for a missing program and for what SGLang is known not to do."""
        if start_of(programs) is None:
            where = ", ".join(str(p) for p in programs.search) or "nowhere"
            raise UsageProblem(
                f"engine 'sglang': no program sglang in {where}; pip install 'pytest-pdperf[sglang]', "
                "or --engine-env with an environment that has it, or --engine sim-sglang for simulated engines"
            )
        if tuple(devices) == ("cpu",):
            raise UsageProblem("engine 'sglang' is started on GPUs only; --gpus cpu works with --engine vllm")
        places: list[tuple[str, Mapping[str, FlagValue]]] = [("engine_args", topology.engine_args)]
        places += [(f"roles.{role.value}.args", spec.args) for role, spec in topology.roles.items()]
        for place, args in places:
            _refuse(f"{topology.name}: {place}.", args)
        kv = topology.kv_transfer
        if kv is not None and kv.connector not in _BACKENDS:
            raise UsageProblem(
                f"{topology.name}: kv_transfer.connector is {kv.connector!r}, which SGLang lacks; use "
                + " or ".join(map(repr, _BACKENDS))
            )
        if kv is not None and (kv.connector, kv.transport) == ("mooncake", "nvlink"):
            raise UsageProblem(
                f"{topology.name}: kv_transfer.transport 'nvlink' is set up for connector 'nixl' only; use that, or "
                "transport: auto with env: {SGLANG_MOONCAKE_CUSTOM_MEM_POOL: INTRA_NODE_NVLINK}"
            )

    def command(self, instance: Instance, programs: Programs) -> Command:
        """The command line and environment of one role. Raises UsageProblem for arguments with another owner."""
        _refuse(f"arguments of {instance.id}: ", instance.args)
        _refuse_named_devices(instance)
        if ":" in instance.served_model:
            raise UsageProblem(
                f"--served-model-name {instance.served_model!r}: SGLang reads what follows a colon as an adapter; "
                "choose a name without"
            )
        argv = list(start_of(programs) or ("sglang", "serve"))
        argv += ["--model-path", instance.model, "--served-model-name", instance.served_model]
        argv += ["--host", instance.host, "--port", str(instance.ports.http)]
        argv += ["--nccl-port", str(instance.ports.dist_init), "--enable-metrics"]
        if instance.tensor_parallel > 1:
            argv += ["--tp-size", str(instance.tensor_parallel)]
        if instance.numa_node is not None:
            argv += ["--numa-node", *[str(instance.numa_node)] * instance.tensor_parallel]
        if instance.kv_transfer is not None:
            argv += ["--disaggregation-mode", instance.role.value]
            argv += ["--disaggregation-transfer-backend", instance.kv_transfer.connector]
            if instance.role is Role.PREFILL:
                argv += ["--disaggregation-bootstrap-port", str(instance.ports.bootstrap)]
        argv += flags(sglang_args({k: v for k, v in instance.args.items() if k != "enable_metrics"}))
        start = start_of(programs)
        refuse_unknown(
            sources(Path(start[0]) if start else None, _FLAG_SOURCES),
            argv,
            [SAME_MEANING.get(key, key) for key in _normal(instance.args)],
            place=f"arguments of {instance.id}: ",
            engine=f"sglang {self.version(programs)}",
            written_for=_WRITTEN_FOR,
            help="python -m sglang.launch_server --help",
        )
        return Command(tuple(argv), _environment(instance))

    def stage(self, line: str) -> str | None:
        """Name of the start-up stage that this log line opens, or None."""
        for pattern, name in _STAGES:
            if pattern.search(line):
                return name
        return None

    def root_cause(self, lines: Sequence[str]) -> str | None:
        """The one log line that explains a death, or None when nothing stands out.

        A scheduler logs its traceback in one record and sends SIGQUIT; what the parent then says (`Received sigquit`,
        `Initialization failed`) explains nothing. So: the end of the first traceback that is not such an echo, else a
        telling line, else how the scheduler died.
        """
        inside = False
        plain = died = None
        for raw in lines:
            prefix = _PREFIX.match(raw)
            text = raw[prefix.end() :].rstrip() if prefix else raw.rstrip()
            if _HARMLESS.search(text):
                continue
            if text.endswith(_TRACEBACK):
                inside = True
            elif inside and text and not text[0].isspace():
                inside = False
                if _EXCEPTION.match(text) and not _WRAPPER.search(text):
                    return text
            if died is None and (found := _DIED.search(text)):
                died = found.group()
            if plain is None and _PLAIN.search(text) and not _WRAPPER.search(text):
                plain = text
        return plain or died

    def version(self, programs: Programs) -> str:
        """Version of the engine's distribution, read beside the program; `unknown` when it cannot be told."""
        start = start_of(programs)
        return version_of(Path(start[0]) if start else None, "sglang")

    def longest_context(self, model: str) -> int | None:
        """That of the model."""
        return longest_context(model)

    def supported_prompts(self) -> frozenset[str]:
        """`/generate` takes token ids, `/v1/completions` text; token ids there are no exact prompt behind a router."""
        return frozenset({"generate_ids", "text"})


def start_of(programs: Programs) -> tuple[str, ...] | None:
    """How an SGLang server is started here: its program, or an interpreter that has the package; None without."""
    program = programs.find("sglang")
    if program is not None:
        return (str(program), "serve")
    for folder in programs.search:
        if any(folder.parent.glob("lib/python3*/site-packages/sglang/launch_server.py")):
            for name in ("python3", "python"):
                if (folder / name).is_file():
                    return (str(folder / name), "-m", "sglang.launch_server")
    return None


def _environment(instance: Instance) -> dict[str, str | None]:
    env: dict[str, str | None] = {
        "CUDA_VISIBLE_DEVICES": ",".join(instance.devices),
        # Where decode looks for prefill's KV manager; otherwise the address of some network card.
        "SGLANG_HOST_IP": instance.host,
        # By default every GET /health takes a second and generates a token, in the midst of what is measured.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if instance.devices and all(device.isdigit() for device in instance.devices):
        # Indices come from NVML, which counts by PCI address; CUDA on its own counts fastest first.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    kv = instance.kv_transfer
    if kv is not None and kv.connector == "nixl":
        env.update(UCX_ENV[kv.transport])
        env.update(UCX_READ_BACK)
    if kv is not None and kv.connector == "mooncake" and kv.transport == "tcp":
        env["MC_FORCE_TCP"] = "1"
    env.update(instance.env)
    return env


ENGINE = Sglang()
