"""sglang-router: starts it in front of SGLang-speaking engines and reads what it says about its workers."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_pdperf.engines.base import Command, Programs
from pytest_pdperf.engines.installed import version_of
from pytest_pdperf.routers.base import RouterInstance
from pytest_pdperf.routers.flags import missing
from pytest_pdperf.routers.gateway import counts_every_worker, gateway_flags, worker_flags

PROGRAM = "sglang-router"


class SglangRouter:
    """SGLang's router: sends a request to prefill and decode at once and holds the stream until prefill has answered.

    On a kept-alive connection whose client delays its ACKs, each answer begins about 42 ms late (Nagle's algorithm on
    the router's side). That is the same for aggregated and disaggregated serving, and gone with TCP_QUICKACK.
    """

    name = "sglang_router"

    def check(self, programs: Programs) -> None:
        """Raise UsageProblem when the program is missing."""
        if programs.find(PROGRAM) is None:
            raise missing(self.name, PROGRAM, programs)

    def command(self, router: RouterInstance, programs: Programs) -> Command:
        """Command line and environment. Raises UsageProblem for args that the launcher decides."""
        program = programs.find(PROGRAM)
        argv = [str(program) if program else PROGRAM, "launch"]
        argv += [*gateway_flags(router), *worker_flags(router)]
        return Command(tuple(argv), dict(router.spec.env))

    def ready_path(self, router: RouterInstance) -> str:
        """Path whose 200 answer `sees_all_workers` judges."""
        return "/readiness"

    def sees_all_workers(self, router: RouterInstance, body: Mapping[str, object]) -> bool:
        """True when the readiness body counts every configured worker as healthy."""
        return counts_every_worker(router, body)

    def supported_prompts(self) -> frozenset[str]:
        """`/v1/completions` refuses token ids (422); `/generate` passes `input_ids` on."""
        return frozenset({"generate_ids", "text"})

    def version(self, programs: Programs) -> str:
        """Version of the installed distribution, `unknown` when it cannot be told."""
        return version_of(programs.find(PROGRAM), "sglang-router")


ROUTER = SglangRouter()
