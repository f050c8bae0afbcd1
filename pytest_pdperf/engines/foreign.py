"""An engine that somebody else started: it has a name for keys and reports, and cannot be launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_pdperf.engines.base import Command, Instance, Programs
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.topology import Topology


@dataclass(slots=True)
class ForeignEngine:
    """Stands where an engine is asked for its name. Everything about starting one is refused."""

    name: str = "unknown"
    """As its metrics page or its version tells."""
    simulated: bool = False
    default_router: str = "unknown"

    def check(self, programs: Programs, topology: Topology, devices: Sequence[str]) -> None:
        """Raise UsageProblem: there is nothing to start."""
        raise UsageProblem(f"topology {topology.name}: a deployment behind --target is not launched")

    def command(self, instance: Instance, programs: Programs) -> Command:
        """Raise UsageProblem: there is nothing to start."""
        raise UsageProblem(f"{instance.id}: an engine behind --target is not launched")

    def stage(self, line: str) -> str | None:
        """None: it is up."""
        return None

    def root_cause(self, lines: Sequence[str]) -> str | None:
        """None: how this engine words its errors is not known."""
        return None

    def version(self, programs: Programs) -> str:
        """`unknown`: no program here says anything about it."""
        return "unknown"

    def longest_context(self, model: str) -> int | None:
        """None: the target is asked instead."""
        return None

    def supported_prompts(self) -> frozenset[str]:
        """Empty: the target is asked instead."""
        return frozenset()
