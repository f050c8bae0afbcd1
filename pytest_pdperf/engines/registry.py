"""Engines by name, so that nobody imports an engine (and what it needs) before it is asked for."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import cast

from pytest_pdperf.engines.base import Engine
from pytest_pdperf.errors import UsageProblem

ENGINES = {
    "sglang": "pytest_pdperf.engines.sglang",
    "sim": "pytest_pdperf.engines.sim.engine",
    "sim-sglang": "pytest_pdperf.engines.sim.sglang_engine",
    "vllm": "pytest_pdperf.engines.vllm",
}
"""Name on the command line -> module that holds `ENGINE`. Simulated engines, and no others, are called `sim[-...]`."""


def get_engine(name: str) -> Engine:
    """Turn a name from the command line, the ini file or a topology into an engine.

    Raises UsageProblem for an unknown name and says which known one is nearest.
    """
    module = ENGINES.get(name)
    if module is None:
        near = difflib.get_close_matches(name, ENGINES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageProblem(f"engine {name!r} is not known{hint} (known: {', '.join(sorted(ENGINES))})")
    return cast(Engine, import_module(module).ENGINE)
