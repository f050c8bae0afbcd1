"""Routers by name, so that nobody imports a router's module before it is asked for."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import cast

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.routers.base import Router

ROUTERS = {
    "sglang_router": "pytest_pdperf.routers.sglang_router",
    "smg": "pytest_pdperf.routers.smg",
    "vllm_router": "pytest_pdperf.routers.vllm_router",
}
"""Name in a topology, with underscores -> module that holds `ROUTER`."""


def get_router(name: str) -> Router:
    """Turn a router's name into the router; `vllm-router` and `vllm_router` are the same.

    Raises UsageProblem for an unknown name and says which known one is nearest.
    """
    key = name.replace("-", "_")
    module = ROUTERS.get(key)
    if module is None:
        near = difflib.get_close_matches(key, ROUTERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageProblem(f"router {name!r} is not known{hint} (known: {', '.join(sorted(ROUTERS))})")
    return cast(Router, import_module(module).ROUTER)
