"""A cell that an engine must refuse, because its context is too short, is found before anything starts."""

from __future__ import annotations

from .topology import Topology
from .workload import Cell

_CONTEXT_KEYS = ("max_model_len", "max-model-len", "context_length", "context-length")


def max_context(topology: Topology, untold: int | None = None) -> int | None:
    """Longest prompt plus output that every role takes, in tokens; None when there is no limit.

    `untold` is the limit of a role for which the file sets none.
    """
    limits: list[int] = []
    for spec in topology.roles.values():
        merged = {**topology.engine_args, **spec.args}
        values = [value for key in _CONTEXT_KEYS if isinstance(value := merged.get(key), int) and value > 0]
        told = [value for value in values if not isinstance(value, bool)]
        limits += told or ([] if untold is None else [untold])
    return min(limits, default=None)


def misfit(topology: Topology, cell: Cell, model_limit: int | None = None) -> str | None:
    """Why `cell` cannot run on `topology`, in one line; None when nothing speaks against it.

    `model_limit` is the longest context, in tokens, of a role for which the topology sets none, when it is known.
    """
    need, have = cell.max_context, max_context(topology, model_limit)
    if have is not None and need > have:
        return f"{cell.id} needs {need} tokens of context, {topology.name} has {have}; raise max_model_len"
    return None
