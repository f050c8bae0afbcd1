"""The process of a simulated engine: `python -m pytest_pdperf.engines.sim.server --role decode --port ...`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.roles import Role

from .app import SimEngine
from .connectors import CONNECTORS
from .faults import Faults
from .log import WINDOW_S, Log
from .process import EngineProcess, run
from .profile import link_named, profile_named
from .settings import Settings
from .timer import make_timer
from .windows import Windows


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; names follow vLLM's where it has them."""
    parser = argparse.ArgumentParser(prog="pdperf-sim", description=__doc__)
    parser.add_argument("--role", choices=[role.value for role in Role], required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--side-channel-port", type=int, default=0)
    parser.add_argument("--kv-connector", choices=[*CONNECTORS], default="nixl")
    parser.add_argument("--bootstrap-port", type=int, default=0, help="Mooncake: prefill's bootstrap server")
    parser.add_argument(
        "--shared-storage-path", type=Path, help="ExampleConnector: where KV is kept between the engines"
    )
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--profile", default="fast")
    parser.add_argument("--kv-transport", default="auto")
    parser.add_argument("--kv-load-failure-policy", choices=("fail", "recompute"), default="fail")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--num-gpu-blocks", type=int)
    parser.add_argument("--kv-lease-s", type=float, help="how long unfetched KV is kept on prefill")
    parser.add_argument("--faults", default="")
    parser.add_argument("--seed", default="0", help="equal seeds give equal noise and equal faults")
    parser.add_argument("--ignored", default="", help="engine arguments without meaning here, for the log")
    return parser.parse_args(argv)


def settings_of(options: argparse.Namespace) -> Settings:
    """Checked settings; raises UsageProblem."""
    profile = profile_named(options.profile)
    settings = Settings(
        role=Role(options.role),
        served_model=options.served_model_name,
        profile=profile,
        link=link_named(profile, options.kv_transport),
        faults=Faults.parse(options.faults, "--faults"),
        max_model_len=options.max_model_len or profile.max_model_len,
        max_seqs=options.max_num_seqs or profile.max_seqs,
        token_budget=options.max_num_batched_tokens or profile.token_budget,
        kv_blocks=options.num_gpu_blocks or profile.kv_blocks,
        tensor_parallel=options.tensor_parallel_size,
        host=options.host,
        side_channel_port=options.side_channel_port,
        lease_s=profile.lease_s if options.kv_lease_s is None else options.kv_lease_s,
        recompute_on_failure=options.kv_load_failure_policy == "recompute",
        seed=f"{options.seed} {options.role}",
        connector=options.kv_connector,
        bootstrap_port=options.bootstrap_port,
        shared_storage=options.shared_storage_path,
    )
    for name in ("max_model_len", "max_seqs", "token_budget", "kv_blocks", "tensor_parallel"):
        if getattr(settings, name) < 1:
            raise UsageProblem(f"simulated engine: {name} must be at least 1, got {getattr(settings, name)}")
    if settings.token_budget <= settings.max_seqs:
        raise UsageProblem(
            f"simulated engine: a step of {settings.token_budget} tokens leaves no room for prefill beside "
            f"{settings.max_seqs} sequences"
        )
    if settings.kv_blocks * profile.block_tokens < settings.max_model_len:
        raise UsageProblem(
            f"simulated engine: {settings.kv_blocks} blocks of {profile.block_tokens} tokens cannot hold one request "
            f"of max_model_len={settings.max_model_len}"
        )
    if settings.role is Role.PREFILL and settings.connector != "example" and not settings.side_channel_port:
        raise UsageProblem("simulated engine: role prefill needs --side-channel-port")
    if settings.role is Role.PREFILL and settings.connector == "mooncake" and not settings.bootstrap_port:
        raise UsageProblem("simulated engine: role prefill needs --bootstrap-port for connector 'mooncake'")
    if settings.connector == "example" and settings.shared_storage is None:
        raise UsageProblem("simulated engine: connector 'example' needs --shared-storage-path")
    return settings


class VllmProcess(EngineProcess):
    """A process that talks and listens like `vllm serve`."""

    def loading(self) -> str:
        """As vLLM says it."""
        return f"Starting to load model {self.settings.profile.name}..."

    def loaded(self, took_s: float) -> str:
        """As vLLM says it."""
        return f"Loading weights took {took_s:.2f} seconds (simulated)"

    def make(self, loop: asyncio.AbstractEventLoop) -> SimEngine:
        """The engine, and the windows in which its log sums up."""
        self._engine = engine = SimEngine(self.settings, self.log)
        engine.runner.timer = make_timer(loop, engine.runner.wake)
        self._windows = Windows(self.log, engine.metrics, engine.state, engine.connector)
        return engine

    async def listen_beside(self, loop: asyncio.AbstractEventLoop) -> None:
        """What the KV connector needs."""
        await self._engine.connector.listen(loop)
        self.log.info(f"Starting vLLM server (simulated) on http://{self.settings.host}:{self.port}")

    def ready(self) -> tuple[str, ...]:
        """As uvicorn says it."""
        return ("Application startup complete.",)

    async def until(self, stop: asyncio.Event) -> None:
        """With a line for each window."""
        while not stop.is_set():
            try:
                await asyncio.wait_for(stop.wait(), WINDOW_S)
            except TimeoutError:
                self._windows.transfers = [*self._engine.transfers]
                self._engine.transfers.clear()
                self._windows.tick()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one engine; for the exit status see `process.run`."""
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    return run(options, Log(), settings_of, VllmProcess)


if __name__ == "__main__":
    sys.exit(main())
