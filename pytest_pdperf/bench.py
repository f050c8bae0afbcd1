"""The bench that launches: one stack at a time, brought up on leased GPUs, and taken down until they are empty."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial

from .engines.base import Command
from .errors import BringUpError, TearDownError, UsageProblem
from .evidence.canary import Canary, engine_python, gpu_canary
from .evidence.environment import Environment
from .gpus.disjoint import uuids_of
from .gpus.foreign import ForeignUse
from .inputs import Inputs
from .load.processes import MOST, Processes, explain, processes_for
from .load.target import Target
from .measuring import Measuring, TopologyLaunch
from .narrating import Narrator
from .options import Settings
from .overlap import OPTION, Overlap
from .planning import plan_of
from .probing import EARLIER, THROUGH_THE_ROUTER, exact_form, greedy_by_every_way, prompt_vocabulary
from .provenance import Hardware, LaunchRecord, launch_environment, record_of
from .run_files import RunFiles
from .sites import Site
from .spec.workload import Cell
from .stack import procfs
from .stack.beside import LaunchBeside
from .stack.launch import Stack, launch
from .stack.memory import describe_memory, memory_needs
from .stack.plan import LaunchPlan, check_model
from .stack.processes import environment as child_environment
from .watching import watch_stack

MAX_PORT_PLANS = 5
"""Of one launch, where ports can only be tried once they are planned: on another machine."""

MAX_BRING_UPS = 3
"""Of one launch: the first, and two more after a role died."""

MAX_FAILED_BRING_UPS = 2
"""Of one launch: what fails twice fails every time, and each try may take minutes of GPUs."""


class Bench(Measuring[Stack]):
    """Owns every process of the run. All methods are called from pytest's main thread."""

    def __init__(
        self,
        settings: Settings,
        inputs: Inputs,
        run_id: str,
        files: RunFiles,
        tell: Narrator,
        site: Site,
        worker: str = "",
    ) -> None:
        """`worker` names this process among several that measure for one run; empty when it is alone."""
        super().__init__(settings, inputs, run_id, files, tell)
        self._site = site
        self._owner = f"{run_id}/{worker}" if worker else run_id
        """Marks this process's engines: it ends those, and no sibling's."""
        self._bring_ups = 0
        self._failures: list[BringUpError] = []
        self._started = False
        """Something was started since the GPUs were last seen empty."""
        self._foreign: ForeignUse | None = None
        self._greedy: dict[int, dict[str, tuple[int, ...]]] = {}
        self._overlap = Overlap(settings["overlap_start"], self._start_beside, tell)
        self._disturbed: set[str] = set()
        """Launches of which a cell was measured while another stack was there."""
        off = "--canary off" if settings["canary"] == "off" else OPTION if self._overlap.asked else ""
        self._canaries = site.canaries(self._gpu_canary, off=off, say=tell)

    # -- before anything starts ----------------------------------------------------------------------------

    def prepare(self, launches: Sequence[TopologyLaunch]) -> None:
        """Check programs, devices and placement of the selected launches. Raises UsageProblem."""
        self._selected = tuple(launches)
        if not launches:
            return
        topologies = {one.topology.name: one.topology for one in launches}
        self._site.prepare(list(topologies.values()), in_turn=self._overlap.asked)
        self.devices = self._site.devices
        placements = {name: self._site.placement(name) for name in topologies}
        no_room = "" if self._site.here else "a Slurm job is as large as one topology needs"
        self._overlap.prepare(launches, placements, no_room)
        for topology in topologies.values():
            engine, router = self._inputs.engines[topology.name], self._inputs.routers[topology.name]
            visible = [device for group in self._site.visible(topology).values() for device in group]
            engine.check(self._inputs.programs, topology, list(dict.fromkeys(visible)))
            router.check(self._inputs.programs)
            if not engine.simulated:
                check_model(self._inputs.model)
            if exact_form(engine.supported_prompts() & router.supported_prompts()) is None:
                raise UsageProblem(
                    f"topology {topology.name}: token-id prompts, which alone have an exact length, do not get through "
                    f"router {router.name} to engine {engine.name}; leave router.name out for the engine's usual one"
                )
        for launch_ in launches:
            plan = self._plan(launch_)
            plan.release()
            memory_needs(plan, self._site.gpu_mib)
        if not self._settings["plan"]:
            self._site.reserve()

    def lease_gpus(self) -> None:
        """Keep other runs away from the site. Raises UsageProblem."""
        self._site.hold()

    def describe(self) -> list[str]:
        """Lines for `--plan`: placement, ports, commands and client of every selected launch."""
        lines = self._site.describe()
        for launch_ in self._selected:
            lines += [f"topology {launch_.id}:", *self._site.explain(launch_.topology.name)]
            plan = self._plan(launch_)
            lines += plan.describe()
            lines += describe_memory(memory_needs(plan, self._site.gpu_mib))
            lines += explain(self._inputs.workload.cells, partial(self._processes, plan=plan))
            plan.release()
        return [*lines, *self._overlap.describe()]

    def _processes(self, cell: Cell, plan: LaunchPlan | None) -> Processes:
        """Client processes for a cell on a launch; without one as many as it calls for."""
        cores = MOST if plan is None else len(plan.client.cpus or os.sched_getaffinity(0))
        return processes_for(cell, self._settings["client_processes"], cores)

    # -- one launch ----------------------------------------------------------------------------------------

    def begin(self, launch_: TopologyLaunch) -> None:
        """Make a launch the current one. Nothing starts yet."""
        super().begin(launch_)
        self.problems += self._overlap.drop(but=launch_)
        self._bring_ups = 0
        self._failures = []

    def _forget(self) -> str:
        return "bringing the topology up again"

    def _bring_up(self) -> None:
        if self._bring_ups >= MAX_BRING_UPS:
            raise UsageProblem(
                f"{self.launch.id}: came up {MAX_BRING_UPS} times and did not stay up; giving up on it"
            )
        if len(self._failures) >= MAX_FAILED_BRING_UPS:
            raise BringUpError(
                f"{self.launch.id} did not come up in {MAX_FAILED_BRING_UPS} tries and is not tried again; "
                f"the last: {self._failures[-1].reason}"
            )
        self._site.check()
        self._bring_ups += 1
        self._site.take_turn()
        started = time.monotonic()
        self._started = True
        with self._tell.bringing_up(self.launch.id):
            try:
                beside = self._overlap.take(self.launch)
                self._stack = beside or self._launch_now()
            except BringUpError as failure:
                self._failures.append(failure)
                raise
            self._environment = self._read_environment(self._stack)
            self._watch = watch_stack(
                self._stack,
                self.launch.topology,
                self._site,
                lambda text: self._tell(f"{self.launch.id}: {text}", detail=True),
                lambda text: self._tell(f"{self.launch.id}: {text}"),
            )
        self._foreign = self._site.foreign(
            lambda: {below.proc.pid for below in procfs.descendants(os.getpid())},
            uuids_of(self._site.placement(self.launch.topology.name)) if self._overlap.asked else None,
        )
        took = time.monotonic() - started
        # What came up while another was measured took longer than the wait for it.
        self.bring_ups[self.launch.topology.name] = max(took, self._stack.startup_s["total"])
        how = f"{took:.1f} s after its turn had come" if beside else f"in {took:.1f} s"
        self._announce(f"{self.launch.id} up {how}")
        if waits := self._overlap.begin_after(self.launch):
            self.problems.append(waits)

    def _launch_now(self) -> Stack:
        self._canaries.before(self.launch.id)
        return launch(
            self._plan_with_free_ports(self.launch),
            deadline_s=self._settings["startup_timeout"],
            progress=self._tell.stage,
            sleep=self._tell.sleep,
        )

    def _start_beside(self, launch_: TopologyLaunch) -> LaunchBeside:
        beside = LaunchBeside(
            self._plan_with_free_ports(launch_), deadline_s=self._settings["startup_timeout"]
        )
        beside.start()
        return beside

    def take_down(self) -> None:
        """Stop the current stack, if any, and wait until its GPUs are as empty as before the run.

        Raises TearDownError, which names what is left: processes that cannot be killed, memory that stays in use.
        """
        stack, self._stack = self._stack, None
        try:
            left = stack.close() if stack is not None else ()
            if self._started:
                self._started = False
                left += self._site.wait_emptied(besides=self._overlap.uuids())
        finally:
            self._site.end_turn()
        if left:
            raise TearDownError(self.launch.id, left)
        if stack is not None:
            self._canaries.after(self.launch.id)

    def close(self) -> None:
        """Stop everything and give ports and devices back; safe to call more than once."""
        self._canaries.stop()
        try:
            self.drop()
        finally:
            try:
                self.problems += self._overlap.drop()
            finally:
                self.problems += self._site.release()

    def _plan_with_free_ports(self, launch_: TopologyLaunch) -> LaunchPlan:
        taken: tuple[str, ...] = ()
        for _ in range(MAX_PORT_PLANS):
            plan = self._plan(launch_)
            try:
                taken = plan.launcher.taken(plan.ports())
            except BaseException:
                plan.release()
                raise
            if not taken:
                return plan
            plan.release()
        raise BringUpError(f"no free ports in {MAX_PORT_PLANS} tries; the last: {'; '.join(taken)}")

    def _plan(self, launch_: TopologyLaunch) -> LaunchPlan:
        return plan_of(
            launch_,
            self._inputs,
            self._site,
            logs=self._files.folder / "logs",
            run_id=self._owner,
            client_processes=max(self._processes(cell, None).count for cell in self._inputs.workload.cells),
        )

    # -- one cell ------------------------------------------------------------------------------------------

    def _check(self) -> None:
        assert self._foreign is not None, "a stack that nobody watches"
        self._up().check()
        self._foreign.look()

    def _disturbances(self) -> tuple[str, ...]:
        assert self._foreign is not None, "a stack that nobody watches"
        return self._foreign.reasons()

    def _beside(self) -> str:
        disturbs = self._overlap.disturbs()
        self._disturbed |= {self.launch.id} if disturbs else set()
        return f"measured while {disturbs} ({OPTION})" if disturbs else ""

    def _unknown(self) -> tuple[str, ...]:
        return self._site.unknown

    def _client(self, cell: Cell) -> tuple[tuple[int, ...], int]:
        plan = self._up().plan
        return plan.client.cpus, self._processes(cell, plan).count

    def shared_cores(self) -> bool:
        gpus = self._inputs.measured_gpus
        return gpus is None or gpus.cpu

    def _target(self) -> Target:
        stack, topology = self._up(), self.launch.topology
        limit = self._inputs.engine_args.get("max_model_len", topology.engine_args.get("max_model_len"))
        return Target(
            url=stack.url,
            model=stack.model,
            api="generate" if exact_form(stack.plan.prompt_forms()) == "generate_ids" else "completions",
            vocab=prompt_vocabulary(self._inputs.model),
            max_context=limit if isinstance(limit, int) else None,
        )

    def greedy_answers(self, length: int, count: int) -> dict[str, tuple[int, ...]]:
        """Greedy tokens of one fixed prompt: through the router, now and earlier, without it, and from earlier stacks.

        Without it means from each engine alone, or, where a role cannot serve alone (SGLang), from each pair directly.
        """
        answers = greedy_by_every_way(self.stack(), length, count)
        earlier = self._greedy.setdefault(length, {})
        now = answers[THROUGH_THE_ROUTER]
        answers |= {
            EARLIER if place == self.launch.id else place: tokens for place, tokens in earlier.items()
        }
        earlier[self.launch.id] = now
        return answers

    # -- provenance ----------------------------------------------------------------------------------------

    def hardware(self) -> Hardware:
        """What the numbers of this run are measured on."""
        return self._site.hardware()

    def launch_record(self) -> LaunchRecord:
        """Provenance of the current launch, kept with every stored baseline."""
        assert self._environment is not None, "nothing is up"
        facts = dict(self._canaries.of(self.launch.id))
        if self.launch.id in self._disturbed:
            facts["overlap_start"] = "a cell was measured while another topology came up or stood by"
        return record_of(self._environment, self.hardware(), facts)

    def surroundings(self, launch_id: str) -> Mapping[str, str]:
        """What a launch's canaries said of the machine; empty for a launch of another run."""
        return self._adopted.get(launch_id) or self._canaries.of(launch_id)

    def _gpu_canary(self) -> Canary:
        """Of all leased GPUs, with the torch that the engine uses."""
        python = engine_python(self._inputs.programs, self._inputs.engines[self.launch.topology.name].name)
        env = child_environment(Command((str(python),)), self._owner, "canary")
        return gpu_canary(python, [device.visible for device in self.devices], env)

    def _read_environment(self, stack: Stack) -> Environment:
        topology = self.launch.topology
        environment = launch_environment(
            stack,
            engine=self._inputs.engines[topology.name],
            router=self._inputs.routers[topology.name],
            programs=self._inputs.programs,
            devices=self.devices,
            inventory=self._site.inventory,
            model=self._inputs.model,
            facts=self._site.facts(),
        )
        self._keep_environment(environment)
        return environment
