"""Every stage that an engine's log can name has a limit, within the whole and scaled with it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_pdperf.engines import sglang, vllm
from pytest_pdperf.engines.registry import ENGINES
from pytest_pdperf.engines.sim import engine as sim
from pytest_pdperf.engines.sim import sglang_engine as sim_sglang
from pytest_pdperf.stack.stages import FLOOR_S, REFERENCE_S, STARTING, TABLES, stage_limits


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("vllm", {stage for _, stage in vllm._STAGES}),
        ("sglang", {stage for _, stage in sglang._STAGES}),
        ("sim", set(sim.ENGINE.stages.values())),
        ("sim-sglang", set(sim_sglang.ENGINE.stages.values())),
    ],
)
def test_the_tables_know_the_stages_of_the_engines(name: str, named: set[str]) -> None:
    assert set(TABLES) == set(ENGINES), "a hang is named by its stage whatever the engine"
    assert set(TABLES[name]) == named | {STARTING}
    assert all(FLOOR_S < seconds < REFERENCE_S for seconds in TABLES[name].values())


def test_limits_scale_with_the_start_up_timeout_down_to_a_floor() -> None:
    assert stage_limits(object(), "vllm", REFERENCE_S) == TABLES["vllm"]
    twice = stage_limits(object(), "vllm", 2 * REFERENCE_S)
    assert twice == {stage: 2 * seconds for stage, seconds in TABLES["vllm"].items()}
    assert set(stage_limits(object(), "vllm", 10.0).values()) == {FLOOR_S}


def test_an_engine_may_bring_its_own_table() -> None:
    own = SimpleNamespace(stage_seconds={STARTING: 90.0})
    assert stage_limits(own, "vllm", REFERENCE_S / 2) == {STARTING: 45.0}
    assert stage_limits(object(), "toy", REFERENCE_S) == {}
