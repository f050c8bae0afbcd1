"""How reliably stacks come up and go down: many cycles, everything that could leak counted after each.

    python -m benchmarks.lifecycle --cycles 200
    python -m benchmarks.lifecycle --cycles 10 --prefill 2 --decode 2 --json out.json
    python -m benchmarks.lifecycle --kill-owner --cycles 10

The first form brings a simulated PD stack up behind the real router and takes it down, and counts processes, ports,
lock files, temporary files, file descriptors and threads afterwards. `--kill-owner` kills the process that owns the
stack with SIGKILL instead and measures how long the last of its processes lives; the promise is 5 s.
Exit status 1 when anything leaked, 0 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.lifecycle.scratch import end_on_sigterm, scratch
from pytest_pdperf.engines.base import Engine, Programs
from pytest_pdperf.engines.registry import get_engine
from pytest_pdperf.routers.registry import get_router
from pytest_pdperf.spec.topology import Topology
from pytest_pdperf.stack import procfs
from pytest_pdperf.stack.launch import Stack, launch
from pytest_pdperf.stack.plan import plan_launch
from pytest_pdperf.stack.ports import PortRegistry, port_state, runtime_dir

PROMISE_S = 5.0
"""After SIGKILL of the owner no process of its stack lives longer."""
_DEADLINE_S = 120.0


@dataclass
class Census:
    """What there is at one moment; the difference of two is what leaked."""

    processes: int
    file_descriptors: int
    threads: int
    lock_files: int
    temp_entries: int

    def over(self, before: Census) -> dict[str, int]:
        """Counts that grew."""
        old = asdict(before)
        return {name: value - old[name] for name, value in asdict(self).items() if value > old[name]}


@dataclass
class Cycle:
    """One bring-up and what came after it."""

    up_s: float
    stages_s: dict[str, float]
    down_s: float
    cpu_s: float = 0.0
    """CPU seconds of this process and all it started, over the whole cycle: what a quiet machine has to do, too."""
    load: float = 0.0
    """The machine's load average (1 minute) at the end."""
    leaked: dict[str, int] = field(default_factory=dict)
    busy_ports: tuple[int, ...] = ()


def census(run_id: str, temporary: Path) -> Census:
    """Count what this process and its run hold now; `temporary` is the directory for their temporary files."""
    children = procfs.descendants(os.getpid())
    locks = list((runtime_dir() / "ports").glob("*.lock"))
    own = [p for p in locks if f"pid {os.getpid()} " in _text(p)]
    return Census(
        processes=len(procfs.marked(run_id)) + len(children),
        file_descriptors=len(list(Path("/proc/self/fd").iterdir())),
        threads=threading.active_count(),
        lock_files=len(own),
        temp_entries=sum(1 for _ in temporary.rglob("*")),
    )


def topology(prefill: int, decode: int) -> Topology:
    """A simulated PD deployment of this size."""
    roles = {"prefill": {"replicas": prefill}, "decode": {"replicas": decode}}
    return Topology.model_validate({"name": "soak", "kind": "pd", "roles": roles})


def bring_up(
    top: Topology, engine: Engine, folder: Path, ports: PortRegistry, run_id: str, model: str = "fast"
) -> Stack:
    """Plan and launch behind the engine's usual router."""
    plan = plan_launch(
        top,
        engine,
        get_router(engine.default_router),
        placement={},
        model=model,
        served_model="m",
        programs=Programs((Path(sys.executable).parent,)),
        log_dir=folder,
        run_id=run_id,
        ports=ports,
    )
    return launch(plan, deadline_s=_DEADLINE_S)


def soak(
    cycles: int,
    start: Callable[[Path, PortRegistry, str], Stack],
    *,
    run_id: str,
    say: Callable[[str], None] = print,
) -> list[Cycle]:
    """Bring stacks up and down and count after each cycle what is left; `start` makes one."""
    out: list[Cycle] = []
    ports = PortRegistry()
    with scratch() as place, _temporary(place / "tmp") as temporary:
        before = census(run_id, temporary)
        for number in range(cycles):
            began, cpu = time.monotonic(), _cpu_s()
            with start(place / str(number), ports, run_id) as stack:
                up = time.monotonic()
                used = ports.held()
                stack.check()
            down = time.monotonic()
            cycle = Cycle(up - began, dict(stack.startup_s), down - up)
            cycle.cpu_s, cycle.load = _cpu_s() - cpu, os.getloadavg()[0]
            cycle.leaked = census(run_id, temporary).over(before)
            cycle.busy_ports = tuple(p for p in used if port_state(p) == "busy")
            if stack.leftovers:
                cycle.leaked["survivors"] = len(stack.leftovers)
            out.append(cycle)
            leaked = cycle.leaked or "nothing"
            say(f"cycle {number + 1}: up {cycle.up_s:.2f} s, down {cycle.down_s:.2f} s, leaked {leaked}")
    return out


def summary(cycles: Sequence[Cycle]) -> list[str]:
    """A table of medians and maxima, and what leaked over all cycles."""
    rows: list[tuple[str, list[float]]] = [("bring-up", [c.up_s for c in cycles])]
    rows += [(f"  {stage}", [c.stages_s[stage] for c in cycles]) for stage in ("engines", "router", "pairs")]
    rows += [("tear-down", [c.down_s for c in cycles]), ("CPU, all", [c.cpu_s for c in cycles])]
    lines = [f"{'seconds':<12}{'p50':>8}{'max':>8}"]
    lines += [f"{name:<12}{statistics.median(values):>8.2f}{max(values):>8.2f}" for name, values in rows]
    leaks = {k: max(c.leaked.get(k, 0) for c in cycles) for c in cycles for k in c.leaked}
    busy = sorted({p for c in cycles for p in c.busy_ports})
    lines.append(
        f"load average {min(c.load for c in cycles):.1f}-{max(c.load for c in cycles):.1f}, {os.cpu_count()} CPUs"
    )
    lines.append(f"{len(cycles)} cycles; leaked: {leaks or 'nothing'}; ports still busy: {busy or 'none'}")
    return lines


def kill_owner(cycles: int, args: argparse.Namespace) -> list[float]:
    """Seconds from SIGKILL of the owner until its last process is gone, per cycle."""
    out = []
    for number in range(cycles):
        run_id = f"soak-{os.getpid()}-{number}"
        argv = [sys.executable, "-m", "benchmarks.lifecycle", "--own", run_id, "--engine", args.engine]
        argv += ["--prefill", str(args.prefill), "--decode", str(args.decode)]
        with (
            scratch() as folder,
            subprocess.Popen(
                [*argv, "--folder", str(folder)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
            ) as owner,
        ):
            assert owner.stdout is not None
            if owner.stdout.readline() != b"up\n":
                owner.kill()
                raise SystemExit("the owner did not come up")
            below = [s.proc for s in procfs.descendants(owner.pid)]
            owner.kill()
            began = time.monotonic()
            while procfs.marked(run_id) or any(procfs.is_alive(p) for p in below):
                if time.monotonic() - began > 60:
                    raise SystemExit(f"still alive after 60 s: {procfs.marked(run_id)}")
                time.sleep(0.02)
            out.append(time.monotonic() - began)
        print(f"cycle {number + 1}: {len(below)} processes gone {out[-1]:.2f} s after SIGKILL of their owner")
    return out


def own(args: argparse.Namespace) -> None:
    """Be the owner that gets killed; its folder is the killer's."""
    ports = PortRegistry(args.folder / "ports")
    bring_up(topology(args.prefill, args.decode), get_engine(args.engine), args.folder, ports, args.own)
    print("up", flush=True)
    time.sleep(600)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--engine", default="sim")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--kill-owner", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--own", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    end_on_sigterm()
    if args.own:
        own(args)
        return 0
    if args.kill_owner:
        gone = kill_owner(args.cycles, args)
        print(f"p50 {statistics.median(gone):.2f} s, max {max(gone):.2f} s (promise {PROMISE_S:g} s)")
        _write(args.json, {"gone_s": gone, "promise_s": PROMISE_S})
        return int(max(gone) > PROMISE_S)
    engine, top = get_engine(args.engine), topology(args.prefill, args.decode)
    cycles = soak(
        args.cycles,
        lambda folder, ports, run_id: bring_up(top, engine, folder, ports, run_id),
        run_id=f"soak-{os.getpid()}",
    )
    print("\n".join(summary(cycles)))
    _write(args.json, {"cycles": [asdict(c) for c in cycles]})
    return int(any(c.leaked or c.busy_ports for c in cycles))


def _write(path: Path | None, data: object) -> None:
    if path is not None:
        path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")


def _cpu_s() -> float:
    """Of this process and of all ended processes below it."""
    return sum(os.times()[:4])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """Let this process and its children put temporary files where they can be counted."""
    folder.mkdir()
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield folder
    finally:
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before
