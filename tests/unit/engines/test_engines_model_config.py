"""How long a prompt may be is known before a start where the model or the timing profile says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_pdperf.engines.registry import get_engine
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.inputs import check_context
from pytest_pdperf.spec.loader import find_topologies, find_workload

SHIPPED = [Path(__file__).parents[3] / "fixtures"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"factor": 4}}, None),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({"max_position_embeddings": True}, None),
        ({"max_position_embeddings": "4096"}, None),
        ({}, None),
        ([], None),
        ("{", None),
    ],
)
def test_a_real_engine_takes_what_the_model_was_made_for(
    tmp_path: Path, engine: str, config: object, length: int | None
) -> None:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    assert get_engine(engine).longest_context(str(tmp_path)) == length
    assert get_engine(engine).longest_context("Qwen/Qwen3-32B") is None


@pytest.mark.parametrize("engine", ["sim", "sim-sglang"])
def test_a_cell_too_long_for_the_simulators_profile_is_refused_with_the_way_out(engine: str) -> None:
    (topology,) = find_topologies(["pd-1p2d"], SHIPPED)
    workload = find_workload("sweep", SHIPPED)
    limit = get_engine(engine).longest_context("fast")
    with pytest.raises(
        UsageProblem, match=r"in32768-out128-c1 needs 32896 .* has 16384.*--engine-arg max_model_len=32896"
    ):
        check_context(topology, workload, {}, {}, limit)
    check_context(topology, workload, {"max_model_len": 32896}, {}, limit)
    both = {"prefill": {"max_model_len": 32896}, "decode": {"max_model_len": 32896}}
    check_context(topology, workload, {}, both, limit)
    with pytest.raises(UsageProblem, match="has 16384"):
        check_context(topology, workload, {}, {"prefill": {"max_model_len": 32896}}, limit)
