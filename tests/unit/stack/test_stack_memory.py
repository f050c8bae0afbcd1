"""Whether a model fits is held against what a real engine said on a real GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_pdperf.engines.base import Instance, Ports
from pytest_pdperf.spec.topology import Role
from pytest_pdperf.stack.memory import MemoryNeed, ModelShape, memory_need, read_shape

QWEN3_8B: dict[str, Any] = {
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
H200_MIB = 143771
LIMITS = {"gpu_memory_utilization": 0.85, "max_model_len": 16384}


def shape(tmp_path: Path, **changes: Any) -> ModelShape | str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B | changes))
    return read_shape(str(tmp_path))


def instance(ranks: int = 1, **args: Any) -> Instance:
    return Instance(
        id="prefill-0",
        role=Role.PREFILL,
        ports=Ports(http=1),
        devices=("0",),
        tensor_parallel=ranks,
        model="m",
        served_model="m",
        args=LIMITS | args,
        env={},
        kv_transfer=None,
    )


def need(tmp_path: Path, ranks: int = 1, mib: int = H200_MIB, **args: Any) -> MemoryNeed:
    found = shape(tmp_path)
    assert not isinstance(found, str)
    out = memory_need(found, instance(ranks, **args), mib)
    assert not isinstance(out, str)
    return out


def test_the_arithmetic_is_what_vllm_said_on_an_h200(tmp_path: Path) -> None:
    """vLLM 0.26 logged 15.27 GiB of weights, and 743,120 tokens in 102.05 GiB left for KV cache."""
    found = need(tmp_path)
    assert found.weights_gib == pytest.approx(15.27, abs=0.02)
    bytes_per_token = 102.05 * (1 << 30) / 743_120
    activations_gib = (found.kv_tokens - 743_120) * bytes_per_token / (1 << 30)
    assert 0 < activations_gib < 3


def test_two_ranks_halve_weights_and_double_what_a_token_may_use(tmp_path: Path) -> None:
    one, two = need(tmp_path), need(tmp_path, ranks=2)
    assert two.weights_gib == pytest.approx(one.weights_gib / 2)
    assert two.kv_tokens / one.kv_tokens == pytest.approx(
        2 * (122.2 - 7.63 - 2.9) / (122.2 - 15.27 - 2.9), rel=0.05
    )


def test_more_ranks_than_kv_heads_keep_a_head_each(tmp_path: Path) -> None:
    eight, sixteen = need(tmp_path, ranks=8), need(tmp_path, ranks=16)
    assert sixteen.kv_tokens / eight.kv_tokens < 1.02


def test_an_fp8_kv_cache_holds_twice_the_tokens(tmp_path: Path) -> None:
    assert need(tmp_path, kv_cache_dtype="fp8").kv_tokens == pytest.approx(
        2 * need(tmp_path).kv_tokens, abs=2
    )


@pytest.mark.parametrize(
    ("changes", "args", "why"),
    [
        ({"num_experts": 128}, {}, "num_experts"),
        ({"quantization_config": {"bits": 4}}, {}, "quantised"),
        ({"hidden_size": None}, {}, "lacks or spoils"),
        ({"torch_dtype": "float4"}, {}, "float4"),
        ({}, {"quantization": "awq"}, "awq"),
        ({}, {"kv_cache_dtype": "turbo"}, "turbo"),
        ({}, {"gpu_memory_utilization": "most"}, "most"),
    ],
)
def test_what_is_not_understood_is_unknown(
    tmp_path: Path, changes: dict[str, Any], args: dict[str, Any], why: str
) -> None:
    found = shape(tmp_path, **changes)
    answer = found if isinstance(found, str) else memory_need(found, instance(**args), H200_MIB)
    assert isinstance(answer, str)
    assert why in answer


def test_without_a_local_config_the_size_is_unknown(tmp_path: Path) -> None:
    assert read_shape("Qwen/Qwen3-32B") == "no local config.json"
    (tmp_path / "config.json").write_text("{")
    assert read_shape(str(tmp_path)) == "config.json is no JSON"


def test_the_line_says_what_fits(tmp_path: Path) -> None:
    assert need(tmp_path).describe().startswith("15.3 of 119.3 GiB on each GPU for weights, room for 75")
