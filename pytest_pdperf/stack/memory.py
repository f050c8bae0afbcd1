"""Weights and KV cache compete for a GPU's memory: whether a role fits is arithmetic that needs no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from pytest_pdperf.engines.base import Instance
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.stack.plan import LaunchPlan

GIB = 1 << 30
_BYTES = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
USUAL_SHARE = 0.9
"""Share of a GPU that engines take when they are not told (vLLM's `gpu_memory_utilization`)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's config.json says about its size. Dense decoder-only transformers only."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    dtype: str

    @property
    def parameters(self) -> int:
        """Weights: embedding and head, and for each layer attention (q, k, v, o), a gated MLP and two norms."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.layers * layer + self.hidden

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of K and V of one token over all layers and heads."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES[dtype]


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What one engine puts on each of its GPUs, before activations and CUDA graphs (1 to 2 GiB on top)."""

    gpu_gib: float
    share: float
    """Of the GPU's memory that the engine may take."""
    weights_gib: float
    kv_tokens: int
    """Tokens of KV cache that the rest holds, 0 or less when the weights leave nothing."""
    context: int | None
    """Longest request, `max_model_len`; None when the engine decides."""

    def describe(self) -> str:
        """`16.3 of 71.9 GiB for weights, room for 912,000 tokens of KV cache (55 requests of 16,384)`."""
        budget = self.share * self.gpu_gib
        text = (
            f"{self.weights_gib:.1f} of {budget:.1f} GiB on each GPU for weights, room for {max(0, self.kv_tokens):,} "
            "tokens of KV cache less activations"
        )
        if self.context:
            text += f" ({max(0, self.kv_tokens) // self.context} requests of {self.context:,})"
        return text


def read_shape(model: str) -> ModelShape | str:
    """The shape of a model in a local directory, or why its size is unknown."""
    path = Path(model).expanduser() / "config.json"
    try:
        found = orjson.loads(path.read_bytes())
    except OSError:
        return "no local config.json"
    except ValueError:
        return f"{path.name} is no JSON"
    if not isinstance(found, dict):
        return f"{path.name} is no object"
    config = found.get("text_config", found)
    if config.get("quantization_config"):
        return "quantised weights"
    experts = next(
        (key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)), ""
    )
    if experts or config.get("kv_lora_rank"):
        return f"not a dense transformer ({experts or 'kv_lora_rank'})"
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    try:
        heads = int(config["num_attention_heads"])
        shape = ModelShape(
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            dtype=dtype,
        )
    except (KeyError, TypeError, ValueError) as error:
        return f"config.json lacks or spoils {error}"
    return shape if dtype in _BYTES else f"weights of type {dtype}"


def memory_need(shape: ModelShape, instance: Instance, gpu_mib: int) -> MemoryNeed | str:
    """What `instance` puts on each GPU of `gpu_mib` MiB, or why that cannot be told.

    Weights are split over the tensor-parallel ranks; of the KV heads each rank keeps at least one.
    """
    args = instance.args
    share = args.get("gpu_memory_utilization", args.get("mem_fraction_static", USUAL_SHARE))
    dtype = str(args.get("dtype", "auto"))
    weights = shape.dtype if dtype == "auto" else dtype
    kv_dtype = str(args.get("kv_cache_dtype", "auto"))
    kv = weights if kv_dtype == "auto" else kv_dtype
    if args.get("quantization"):
        return f"weights quantised by {args['quantization']}"
    if unknown := next((name for name in (weights, kv) if name not in _BYTES), None):
        return f"values of type {unknown}"
    if isinstance(share, bool) or not isinstance(share, int | float):
        return f"a memory share of {share!r}"
    ranks = instance.tensor_parallel
    weight_gib = shape.parameters * _BYTES[weights] / ranks / GIB
    gpu_gib = gpu_mib / 1024
    per_token = shape.kv_bytes_per_token(kv) / min(ranks, shape.kv_heads)
    context = args.get("max_model_len", args.get("context_length"))
    return MemoryNeed(
        gpu_gib=gpu_gib,
        share=float(share),
        weights_gib=weight_gib,
        kv_tokens=int((share * gpu_gib - weight_gib) * GIB // per_token),
        context=context if isinstance(context, int) and not isinstance(context, bool) else None,
    )


def memory_needs(plan: LaunchPlan, gpu_mib: Mapping[str, int]) -> dict[str, MemoryNeed | str]:
    """Instance id -> what it needs; `gpu_mib` has the memory of each device by its visible name.

    Raises UsageProblem when weights leave less room than one request of full length takes.
    """
    needs: dict[str, MemoryNeed | str] = {}
    for instance in plan.instances:
        sizes = [gpu_mib[device] for device in instance.devices if device in gpu_mib]
        if not sizes:
            continue
        shape = read_shape(instance.model)
        need = shape if isinstance(shape, str) else memory_need(shape, instance, min(sizes))
        if not isinstance(need, str) and need.kv_tokens < (need.context or 1):
            raise UsageProblem(
                f"{plan.topology.name}: {instance.id} does not fit its GPUs: {need.describe()}; want more "
                f"tensor_parallel than {instance.tensor_parallel}, a larger gpu_memory_utilization or a smaller "
                "max_model_len"
            )
        needs[instance.id] = need
    return needs


def describe_memory(needs: Mapping[str, MemoryNeed | str]) -> list[str]:
    """Lines for `--plan`."""
    return [
        f"  {id} memory: {need.describe() if isinstance(need, MemoryNeed) else f'unknown: {need}'}"
        for id, need in needs.items()
    ]
