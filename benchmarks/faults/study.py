"""Is each fault named by what is seen from outside, and nobody else accused? Real processes behind the real router.

    python -m benchmarks.faults                           100 runs of each knob, 200 healthy ones
    python -m benchmarks.faults --runs 3 --healthy 6      a look

One simulated stack (1 prefill, 1 decode, vllm-router) stays up for all runs; knobs are changed in its engines while
they live, in random order and with random strength. A run is one cell of six requests through the router, judged as
every cell of `pytest -m pd` is, and one greedy probe. Who dies is started again, each time with `slow_start`: that is
the run of that knob. Prints what every knob was taken for; the exit status is 1 when any run was named wrongly.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median

from pytest_pdperf.breaking import misbehave
from pytest_pdperf.engines.base import Instance, Programs
from pytest_pdperf.engines.registry import get_engine
from pytest_pdperf.errors import RoleDied
from pytest_pdperf.evidence.cell_evidence import Watched
from pytest_pdperf.evidence.cell_window import Instruments, StackWatch
from pytest_pdperf.evidence.drain import Drain, wait_drained
from pytest_pdperf.evidence.exposition import Snapshot, Unknown
from pytest_pdperf.evidence.naming import Fault, Finding, Naming, against, died
from pytest_pdperf.evidence.speeds import Usual
from pytest_pdperf.load.job import Job
from pytest_pdperf.load.plan import plan_cell
from pytest_pdperf.load.results import read_records
from pytest_pdperf.load.target import Target
from pytest_pdperf.load.worker import run_job
from pytest_pdperf.measure.records import CellRecords
from pytest_pdperf.probing import ALONE, THROUGH_THE_ROUTER, kv_damage
from pytest_pdperf.report.usual_speed import speeds_of, usual_of
from pytest_pdperf.routers.registry import get_router
from pytest_pdperf.spec.topology import Kind, Role, Topology
from pytest_pdperf.spec.workload import Cell, ClosedLoop, Stream
from pytest_pdperf.stack.greedy import ProbeError, probe
from pytest_pdperf.stack.launch import Stack, launch
from pytest_pdperf.stack.plan import plan_launch
from pytest_pdperf.stack.ports import PortRegistry
from pytest_pdperf.watching import blame_a_death

ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
HALF = 3
"""Requests before and after the look in the middle."""
LEASE_S = 1.0
TIMEOUT_S = 2.0
"""Of a request: longer than the lease, so that KV which was never fetched has expired before the cell ends."""
PROBE = tuple(range(200, 264))
DEADLINE_S = 120.0
DRAIN_S = 5.0
HEALTHY = "healthy"
DIES = "die_after_tokens"
STARTS = "slow_start"


@dataclass(frozen=True)
class Knob:
    """One fault of the simulator: how it is set, and how it must be named."""

    name: str
    role: str
    value: Callable[[Random], str]
    fault: Fault
    where: frozenset[str]
    """Who may be accused: the KV link joins two engines, and the one that reads counts."""
    midway: bool = False
    """Begins in the middle of the cell."""
    strands: bool = False
    """Leaves KV on prefill until its lease ends; the next run begins after that."""


def _factor(random: Random) -> str:
    return f"{random.uniform(1.2, 2.0):.3f}"


def _every(random: Random) -> str:
    return f"every:{random.randint(1, HALF)}"


_P, _D = frozenset({"prefill-0"}), frozenset({"decode-0"})

KNOBS = (
    Knob("decode_step", "decode-0", _factor, Fault.SLOW_DECODE, _D),
    Knob("prefill", "prefill-0", _factor, Fault.SLOW_PREFILL, _P),
    Knob("link", "prefill-0", lambda r: f"{r.uniform(0.3, 0.8):.3f}", Fault.SLOW_LINK, _D),
    Knob("throttle", "decode-0", lambda r: f"{_factor(r)}:0", Fault.THROTTLED, _D, midway=True),
    Knob("transfer_fail", "decode-0", _every, Fault.TRANSFER_FAILED, _D, strands=True),
    Knob(
        "drop_transfer",
        "prefill-0",
        lambda r: f"every:{r.randint(4, 6)}",
        Fault.TRANSFER_LOST,
        _P,
        strands=True,
    ),
    Knob("recompute", "decode-0", _every, Fault.RECOMPUTED, _D),
    Knob("corrupt", "decode-0", lambda r: "1", Fault.CORRUPT, frozenset({"decode"})),
    Knob("leak", "decode-0", _every, Fault.LEAK, _D),
    Knob("error_in_stream", "decode-0", _every, Fault.ERROR_IN_STREAM, _D),
    Knob("short_output", "decode-0", _every, Fault.SHORT_OUTPUT, _D),
    Knob(DIES, "decode-0", lambda r: str(r.randint(3, 20)), Fault.DIED, _D),
    Knob(STARTS, "decode-0", lambda r: "1.5", Fault.SLOW_START, _D),
)


@dataclass(frozen=True)
class Run:
    """What one run was, and what it was taken for."""

    knob: str
    value: str
    named: tuple[Finding, ...]
    right: bool
    seconds: float


class Study:
    """One stack and what is usual on it."""

    def __init__(self, stack: Stack, folder: Path, seed: int) -> None:
        self.stack = stack
        self._folder = folder
        self._random = Random(seed)
        self._cells = 0
        self._engines: dict[str, Instance] = {i.id: i for i in stack.plan.instances}
        self._target = Target(url=stack.url, model=stack.model, vocab=(100, 30_000))
        self._tokens = probe(self._engines["decode-0"].url, stack.model, PROBE, 4)
        self._usual = Usual(why_not="not learned yet")
        self._watch = self._watched()

    def _watched(self) -> StackWatch:
        stack = self.stack
        return StackWatch(Watched(Kind.PD, ROLES, stack.role_urls, stack.logs), Instruments(drain=_drain))

    def learn(self, cells: int) -> None:
        """What a healthy cell looks like, kept as a baseline keeps it."""
        self._usual = usual_of([speeds_of(self._cell(None, "")) for _ in range(cells)])

    def run(self, knob: Knob | None) -> list[Run]:
        """One run; the death of an engine is two, for it is then started slowly."""
        began = time.monotonic()
        if knob is None:
            return [self._judged(HEALTHY, "", None, self._cell(None, ""), began)]
        value = knob.value(self._random)
        one = self._judged(knob.name, value, knob, self._cell(knob, value), began)
        if knob.name != DIES:
            misbehave(self._engines[knob.role], "")
            if knob.strands:
                time.sleep(1.5 * LEASE_S)
            return [one]
        slow = next(k for k in KNOBS if k.name == STARTS)
        began, value = time.monotonic(), slow.value(self._random)
        self.restart(f"{STARTS}={value}")
        return [one, self._judged(STARTS, value, slow, self._cell(None, ""), began)]

    def restart(self, faults: str = "") -> None:
        """Start decode again, and have the new engine shake hands."""
        command = self.stack.plan.commands["decode-0"]
        if faults:
            command = replace(command, argv=(*command.argv, "--faults", faults))
        self.stack.restart("decode-0", deadline_s=DEADLINE_S, command=command)
        self._probe(timeout_s=30.0)
        self._watch = self._watched()

    def healthy_restart(self) -> Run:
        """A healthy run on an engine that has just started."""
        began = time.monotonic()
        self.restart()
        return self._judged(HEALTHY, "restart", None, self._cell(None, ""), began)

    def _cell(self, knob: Knob | None, value: str) -> Naming:
        """Two halves through the router inside one window, as the suite has it around a cell."""
        fault = f"{knob.name}={value}" if knob else ""
        with self._watch.cell() as window:
            if knob and not knob.midway:
                misbehave(self._engines[knob.role], fault)
            first = self._half()
            window.midway()
            if knob and knob.midway:
                misbehave(self._engines[knob.role], fault)
            second = self._half()
            records = replace(first, requests=(*first.requests, *second.requests))
            try:
                blame_a_death(self.stack, records)
            except RoleDied as death:
                return Naming((died(death),))
            return window.judge(records).naming

    def _half(self) -> CellRecords:
        stream = Stream(
            input_tokens=(48, 48), output_tokens=6, requests=HALF, arrival=ClosedLoop(concurrency=1)
        )
        cell = Cell(workload="faults", id="cell", streams=(stream,), warmups=0, timeout_s=TIMEOUT_S)
        self._cells += 1
        plans = plan_cell(cell, self._target, seed=self._cells, salt=f"faults {self._cells}")
        run_job(
            Job(self._target, plans, TIMEOUT_S, f"cell-{self._cells}"), self._folder, environ=dict(os.environ)
        )
        return read_records(self._folder)

    def _probe(self, timeout_s: float = 3.0) -> Finding | None:
        try:
            answer = probe(self.stack.url, self.stack.model, PROBE, 4, timeout_s=timeout_s)
        except ProbeError:
            return None
        return kv_damage({THROUGH_THE_ROUTER: answer, f"decode-0{ALONE}": self._tokens})

    def _judged(self, name: str, value: str, knob: Knob | None, seen: Naming, began: float) -> Run:
        dead = any(one.fault is Fault.DIED for one in seen.findings)
        named = seen.findings if dead else against(seen, self._usual).findings
        if not dead and (damage := self._probe()):
            named = (*named, damage)
        right = (
            not named
            if knob is None
            else (len(named) == 1 and named[0].fault is knob.fault and named[0].where in knob.where)
        )
        return Run(name, value, named, right, time.monotonic() - began)


def _drain(
    urls: Mapping[str, str], timeout_s: float, before: Mapping[str, Snapshot | Unknown] | None
) -> Drain:
    """As a run waits, but for no more than what a leak takes to be seen, and without its pauses."""
    return wait_drained(urls, min(timeout_s, DRAIN_S), before=before, poll_s=0.01)


def bring_up(folder: Path, ports: PortRegistry) -> Stack:
    """The stack of all runs."""
    top = Topology.model_validate(
        {
            "name": "faults",
            "kind": "pd",
            "roles": {"prefill": {"args": {"kv_lease_s": LEASE_S}}, "decode": {}},
            "kv_transfer": {"connector": "nixl"},
        }
    )
    engine = get_engine("sim")
    plan = plan_launch(
        top,
        engine,
        get_router(engine.default_router),
        placement={},
        model="fast",
        served_model="m",
        programs=Programs((Path(sys.executable).parent,)),
        log_dir=folder,
        run_id=f"faults-{os.getpid()}",
        ports=ports,
    )
    return launch(plan, deadline_s=DEADLINE_S)


def order(runs: int, healthy: int, knobs: Sequence[Knob], seed: int) -> list[Knob | None]:
    """All runs in random order. `slow_start` comes along with `die_after_tokens`."""
    wanted: list[Knob | None] = [knob for knob in knobs if knob.name != STARTS for _ in range(runs)]
    wanted += [None] * healthy
    Random(seed).shuffle(wanted)
    return wanted


def table(runs: Sequence[Run]) -> list[str]:
    """Knob by knob: how often it was named rightly, and what else it was taken for."""
    lines = ["| knob | runs | named rightly | taken for something else |", "|---|---|---|---|"]
    for name in [*(knob.name for knob in KNOBS), HEALTHY]:
        own = [run for run in runs if run.knob == name]
        if not own:
            continue
        wrong = Counter(
            " + ".join(f"{a.fault.value} ({a.where})" for a in run.named) or "nothing"
            for run in own
            if not run.right
        )
        shown = "; ".join(f"{words}: {count}" for words, count in wrong.most_common()) or "-"
        lines.append(f"| {name} | {len(own)} | {sum(run.right for run in own)} | {shown} |")
    return lines


def study(
    runs: int,
    healthy: int,
    *,
    seed: int = 0,
    knobs: Sequence[Knob] = KNOBS,
    say: Callable[[str], None] = print,
) -> list[Run]:
    """Bring the stack up, do every run, take it down."""
    found: list[Run] = []
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="pdperf-faults-")))
        ports = PortRegistry()
        exits.callback(ports.close)
        stack = exits.enter_context(bring_up(folder / "logs", ports))
        assert stack.hangs is not None
        stack.hangs.stop()  # its looks are no part of a run
        one = Study(stack, folder, seed)
        one.learn(5)
        began = time.monotonic()
        todo = order(runs, healthy, knobs, seed)
        for number, knob in enumerate(todo, 1):
            # Every tenth healthy run is of an engine that has just started.
            fresh = knob is None and sum(run.knob == HEALTHY for run in found) % 10 == 9
            new = [one.healthy_restart()] if fresh else one.run(knob)
            found += new
            for run in new:
                if not run.right:
                    seen = "; ".join(one.line for one in run.named) or "nothing"
                    say(f"WRONG {run.knob}={run.value}: {seen}")
            if number % 100 == 0:
                say(f"{number} of {len(todo)}, {time.monotonic() - began:.0f} s")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.faults", description=__doc__.split("\n", 1)[0] if __doc__ else ""
    )
    parser.add_argument("--runs", type=int, default=100, help="of each knob (default 100)")
    parser.add_argument("--healthy", type=int, default=200, help="healthy runs (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--knob", action="append", choices=[k.name for k in KNOBS], help="only these knobs")
    parser.add_argument("--json", type=Path, help="write every run to this file")
    options = parser.parse_args(argv)
    knobs = [k for k in KNOBS if not options.knob or k.name in options.knob]
    began = time.monotonic()
    found = study(options.runs, options.healthy, seed=options.seed, knobs=knobs)
    print(*table(found), sep="\n")
    wrong = [run for run in found if not run.right]
    load = os.getloadavg()[0]
    print(
        f"{len(found)} runs in {time.monotonic() - began:.0f} s (median {median(run.seconds for run in found):.2f} s), "
        f"{len(wrong)} named wrongly; {os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}"
    )
    if options.json:
        rows = [
            {
                "knob": run.knob,
                "value": run.value,
                "named": [[a.fault.value, a.where, a.because] for a in run.named],
                "right": run.right,
                "seconds": round(run.seconds, 3),
            }
            for run in found
        ]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if wrong else 0
