"""The one small interface behind which every router lives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pytest_pdperf.engines.base import Command, Instance, Programs
from pytest_pdperf.spec.topology import Kind, KvTransfer, RouterSpec


@dataclass(frozen=True, slots=True)
class RouterInstance:
    """One router process with everything decided."""

    spec: RouterSpec
    kind: Kind
    port: int
    metrics_port: int
    workers: Sequence[Instance]
    kv_transfer: KvTransfer | None
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        """Base URL that clients talk to."""
        return f"http://{self.host}:{self.port}"


class Router(Protocol):
    """How to start one router and how to tell that it sees its workers."""

    name: str

    def check(self, programs: Programs) -> None:
        """Raise UsageProblem when the program is missing, naming what to install."""

    def command(self, router: RouterInstance, programs: Programs) -> Command:
        """Command line and environment."""

    def ready_path(self, router: RouterInstance) -> str:
        """Path whose 200 answer `sees_all_workers` judges."""

    def sees_all_workers(self, router: RouterInstance, body: Mapping[str, object]) -> bool:
        """True when the readiness body counts every configured worker of every role."""

    def supported_prompts(self) -> frozenset[str]:
        """Which of `token_ids`, `text`, `generate_ids` pass through."""

    def version(self, programs: Programs) -> str:
        """Version of the router package, `unknown` when it cannot be told."""
