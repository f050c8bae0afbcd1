"""A cell that an engine must refuse, because its context is too short, is found before anything starts."""

from __future__ import annotations

from .topology import Topology
from .workload import Cell

_CONTEXT_KEYS = ("max_model_len", "max-model-len", "context_length", "context-length")


def max_context(topology: Topology) -> int | None:
    """Longest prompt plus output that every role takes, in tokens; None when the file sets no limit."""
    limits = []
    for spec in topology.roles.values():
        merged = {**topology.engine_args, **spec.args}
        values = [value for key in _CONTEXT_KEYS if isinstance(value := merged.get(key), int) and value > 0]
        limits += [value for value in values if not isinstance(value, bool)]
    return min(limits, default=None)


def misfit(topology: Topology, cell: Cell, model_limit: int | None = None) -> str | None:
    """Why `cell` cannot run on `topology`, in one line; None when nothing speaks against it.

    `model_limit` is the model's own longest context in tokens, when it is known.
    """
    limits = [limit for limit in (max_context(topology), model_limit) if limit is not None]
    if limits and cell.max_context > min(limits):
        need, have = cell.max_context, min(limits)
        return f"{cell.id} needs {need} tokens of context, {topology.name} has {have}; raise max_model_len"
    return None
