"""smg: starts it in front of SGLang- or vLLM-speaking engines, and tells it how vLLM's engines hand over their KV."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from pytest_pdperf.engines.base import Command, Programs
from pytest_pdperf.engines.installed import head_of, python_of, site_folders, version_of
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.routers.base import RouterInstance
from pytest_pdperf.routers.flags import missing
from pytest_pdperf.routers.gateway import counts_every_worker, gateway_flags, worker_flags
from pytest_pdperf.routers.smg_register import CONNECTORS
from pytest_pdperf.spec.topology import FlagValue, Kind, Role

PROGRAM = "smg"
_OWN_DEFAULTS: Mapping[str, FlagValue] = {
    # It would load each worker's tokenizer by name, from the network if need be; what it forwards needs none.
    "disable_tokenizer_autoload": True,
}
REGISTER = "pytest_pdperf.routers.smg_register"


class Smg:
    """Shepherd Model Gateway.

    Disaggregated workers are registered over its admin API, by a helper that becomes smg itself: on the command line a
    vLLM worker's KV connector cannot be said, and without it smg sends both legs, transfers nothing, and every answer
    is right all the same.
    """

    name = "smg"

    def check(self, programs: Programs) -> None:
        """Raise UsageProblem when the program is missing."""
        if start_of(programs) is None:
            raise missing(self.name, PROGRAM, programs)

    def command(self, router: RouterInstance, programs: Programs) -> Command:
        """Command line and environment. Raises UsageProblem for args of the launcher's and for a connector it lacks.

        Without a connector that it knows smg sends both legs at once; decode then looks for files not there yet.
        """
        launch = [*(start_of(programs) or (PROGRAM,)), "launch", *gateway_flags(router, _OWN_DEFAULTS)]
        env = dict(router.spec.env)
        if router.kind is not Kind.PD:
            return Command((*launch, *worker_flags(router)), env)
        connector = router.kv_transfer.connector if router.kv_transfer else "nixl"
        if connector not in CONNECTORS:
            raise UsageProblem(
                f"router 'smg': kv_transfer.connector {connector!r} is not one it serves, as it sends prefill and "
                f"decode at once; use router: {{name: vllm_router}} or a connector of {', '.join(CONNECTORS)}"
            )
        argv = [sys.executable, "-m", REGISTER, "--router", router.url, "--connector", connector]
        for worker in router.workers:
            if worker.role is Role.PREFILL:
                argv += ["--prefill", worker.url, str(worker.ports.bootstrap)]
            else:
                argv += ["--decode", worker.url]
        return Command((*argv, "--", *launch, "--pd-disaggregation"), env)

    def ready_path(self, router: RouterInstance) -> str:
        """Path whose 200 answer `sees_all_workers` judges."""
        return "/readiness"

    def sees_all_workers(self, router: RouterInstance, body: Mapping[str, object]) -> bool:
        """True when the readiness body counts every configured worker as healthy."""
        return counts_every_worker(router, body)

    def supported_prompts(self) -> frozenset[str]:
        """`/v1/completions` refuses token ids in front of disaggregated workers (400); `/generate` passes them on."""
        return frozenset({"generate_ids", "text"})

    def version(self, programs: Programs) -> str:
        """Version of the installed distribution, `unknown` when it cannot be told."""
        for folder in programs.search:
            found = version_of(folder / PROGRAM, PROGRAM) if (folder / PROGRAM).is_file() else "unknown"
            if found != "unknown":
                return found
        return "unknown"


def start_of(programs: Programs) -> tuple[str, ...] | None:
    """How smg is started here, None when it is not installed.

    sglang-router installs a script `smg` too, of the same name and of another product; whichever package came last owns
    the file. Behind such a script the real smg may still be there as a module.
    """
    for folder in programs.search:
        program = folder / PROGRAM
        if not program.is_file():
            continue
        if "sglang_router" not in head_of(program):
            return (str(program),)
        python = python_of(program)
        if python is not None and any((site / "smg/__main__.py").is_file() for site in site_folders(program)):
            return (str(python), "-m", PROGRAM)
    return None


ROUTER = Smg()
