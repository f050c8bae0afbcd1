"""Every engine behind every router: the contract, with real routers.

Set PDPERF_CPU_ENGINES to an environment with a CPU build of vLLM (scripts/cpu_vllm/build.py --mooncake) to hold that to
it as well; `tox run -e cpu` does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pytest_pdperf.engines.base import Programs
from pytest_pdperf.engines.registry import ENGINES, get_engine
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.routers.registry import ROUTERS, get_router
from pytest_pdperf.spec.topology import Kind
from tests.integration.engine_contract import Case, EngineContract

HERE = Programs((Path(sys.executable).parent,))
CPU = os.environ.get("PDPERF_CPU_ENGINES")

SIMULATED = [("sim", "vllm_router"), ("sim", "smg"), ("sim-sglang", "sglang_router"), ("sim-sglang", "smg")]
OTHER_CONNECTORS = [
    ("sim", "vllm_router", "mooncake"),
    ("sim", "vllm_router", "example"),
    ("sim", "smg", "mooncake"),
]
"""Beside NIXL. smg does not serve vLLM's example connector; SGLang's legs are the same for both of its connectors."""
TAIL = {"example": 16}
"""Of 64 tokens in blocks of 16: the connector leaves two tokens or more, so a whole block."""


def cases() -> list[Case]:
    found = [
        Case(get_engine(engine), get_router(router), kind, HERE)
        for engine, router in SIMULATED
        for kind in (Kind.PD, Kind.AGGREGATED)
    ]
    found += [
        Case(
            get_engine(engine),
            get_router(router),
            Kind.PD,
            HERE,
            connector=connector,
            tail=TAIL.get(connector, 0),
        )
        for engine, router, connector in OTHER_CONNECTORS
    ]
    if CPU:
        programs = Programs((Path(CPU).absolute() / "bin", *HERE.search))
        found += [
            Case(
                get_engine("vllm"),
                get_router(router),
                kind,
                programs,
                model=str(Path(CPU).absolute() / "tiny-qwen3"),
                devices=("cpu",),
                engine_args=(("max_model_len", 1024),),
                fronts=1,
                long_answer=900,
                context=1024,
                start_s=420.0,
                connector=connector,
                prompt=300 if connector == "example" else 64,
                tail=44 if connector == "example" else 0,
            )
            for router, kind, connector in (
                ("vllm_router", Kind.PD, "nixl"),
                ("vllm_router", Kind.PD, "mooncake"),
                ("vllm_router", Kind.PD, "example"),
                ("vllm_router", Kind.AGGREGATED, "nixl"),
                ("smg", Kind.PD, "nixl"),
            )
        ]
    return found


class TestEngines(EngineContract):
    @pytest.fixture(scope="class", params=cases(), ids=lambda case: case.id)
    @classmethod
    def case(cls, request: pytest.FixtureRequest) -> Case:
        case = request.param
        assert isinstance(case, Case)
        try:
            case.router.check(case.programs)
        except UsageProblem as problem:
            pytest.skip(str(problem))
        return case


def test_every_simulated_engine_and_every_router_is_held_to_the_contract() -> None:
    simulated = {name for name in ENGINES if get_engine(name).simulated}
    assert {engine for engine, _ in SIMULATED} == simulated
    assert {router for _, router in SIMULATED} == set(ROUTERS)
