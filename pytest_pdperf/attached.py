"""The bench that launches nothing: measures a deployment which runs already, and leaves it as it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from .errors import BringUpError, CannotCompare, RoleDied, UsageProblem
from .evidence.cell_evidence import Watched
from .evidence.cell_window import DRAIN_POLL_S, MIDWAY_TIMEOUT_S, PAGE_TIMEOUT_S, Instruments, StackWatch
from .evidence.drain import Drain, wait_drained
from .evidence.environment import Environment, read_environment
from .evidence.exposition import Snapshot, Unknown
from .evidence.scrape import scrape
from .evidence.transport import LinkBytes
from .inputs import Inputs
from .load.processes import MOST, Processes, explain, processes_for
from .load.target import Target
from .measuring import Measuring, TopologyLaunch
from .narrating import Narrator
from .options import Settings
from .places.deployment import Deployment, look
from .places.found import explained, named_in, notes_of
from .places.greeting import Greeting, greet
from .places.named import topology_of
from .probing import ALONE, THROUGH_THE_ROUTER, prompt_vocabulary
from .provenance import Hardware, LaunchRecord
from .run_files import RunFiles
from .spec.topology import Kind
from .spec.workload import Cell
from .stack.greedy import ProbeError, probe
from .stack.hangs import HangWatch


class AttachedStack:
    """A deployment of somebody else's, watched for hangs from here."""

    def __init__(self, deployment: Deployment, happened: Callable[[], Mapping[str, str]] = dict) -> None:
        self.deployment = deployment
        self._happened = happened
        self._hangs = HangWatch(deployment.watchable, access=deployment.named.access)
        self._hangs.start()

    @property
    def url(self) -> str:
        """Base URL that clients talk to."""
        return self.deployment.named.url

    @property
    def model(self) -> str:
        """Model name for requests."""
        return self.deployment.model

    @property
    def role_urls(self) -> dict[str, str]:
        """Instance id -> URL of the engines that are named."""
        return self.deployment.named.urls

    def check(self) -> None:
        """Raise RoleDied when the target or a named engine that answered before is silent."""
        for instance, text in self._happened().items():
            raise RoleDied(instance, text)
        silent = self._hangs.hangs()
        if silent:
            worst = max(silent, key=lambda hang: hang.silent_s)
            raise RoleDied(worst.instance, f"no answer for {worst.silent_s:.0f} s ({worst.what})")

    def close(self) -> None:
        """Stop watching."""
        self._hangs.stop()
        self._hangs.join()


class AttachedBench(Measuring[AttachedStack]):
    """Measures through the target; metrics and evidence come from the engines that are named, else they are unknown."""

    relaunches = False

    def __init__(
        self, settings: Settings, inputs: Inputs, run_id: str, files: RunFiles, tell: Narrator
    ) -> None:
        super().__init__(settings, inputs, run_id, files, tell)
        assert inputs.deployment is not None, "a bench for --target without one"
        self._deployment = inputs.deployment
        self._greeting: Greeting | None = None
        self._cluster = inputs.cluster

    @property
    def _key_variable(self) -> str | None:
        return self._deployment.named.access.key_env

    # -- before anything is measured -----------------------------------------------------------------------

    def prepare(self, launches: Sequence[TopologyLaunch]) -> None:
        """Send the first requests, unless this is only a plan. Raises UsageProblem."""
        self._selected = tuple(launches)
        if launches and not self._settings["plan"]:
            self._greeting = greet(self._deployment)
            self.problems += self._notes()

    def _notes(self) -> tuple[str, ...]:
        pods = notes_of(self._cluster, self._deployment.named) if self._cluster is not None else ()
        return (*self._deployment.notes, *pods)

    def lease_gpus(self) -> None:
        """The deployment's GPUs are not this machine's to lease."""

    def describe(self) -> list[str]:
        """Lines for `--plan`: what would be measured through which addresses."""
        named = self._deployment.named
        lines = []
        for launch_ in self._selected:
            lines += [
                f"topology {launch_.id}: attached, {launch_.topology.kind.value}, engine {self._deployment.engine} "
                f"{self._deployment.version}, model {self._deployment.model}",
                f"  target {named.url} (TLS: {named.access.describe(named.url)}; "
                f"API key: {named.access.key_env or 'none'})",
                *(f"  {name} {url}" for name, url in named.urls.items()),
                *(f"  router {url}" for url in named.routers),
                *(f"  {name}: {text}" for name, text in self._pods().items()),
                *(f"  {note}" for note in self._notes()),
            ]
        return [*lines, *explain(self._inputs.workload.cells, self._processes)]

    # -- one stay ------------------------------------------------------------------------------------------

    def _forget(self) -> str:
        self._greeting = None
        return "looking for the deployment again"

    def _bring_up(self) -> None:
        if self._greeting is None:
            self._look_again()
        happened = self._cluster.happened if self._cluster is not None else dict
        self._stack = AttachedStack(self._deployment, happened)
        watched = watched_of(self._deployment, self.launch)
        if self._cluster is not None:
            logs = self._cluster.follow_logs(self._files.folder / "logs" / self.launch.id)
            watched = replace(watched, logs=logs)
        self._watch = StackWatch(watched, _instruments(self._deployment, self.launch))
        self._environment = self._read_environment()
        self._announce(f"{self.launch.id} attached at {self._deployment.named.url}")

    def _look_again(self) -> None:
        try:
            with explained(self._cluster):
                named = self._deployment.named
                if self._cluster is not None:
                    named = named_in(self._cluster, self._settings)
                    topology_of(named, self.launch.topology)
                found = look(named, (self._deployment.model,))
                self._deployment = replace(found, engine=self._deployment.engine)
                self._greeting = greet(self._deployment)
        except UsageProblem as problem:
            raise BringUpError(f"{self.launch.id}: {problem}") from None

    def take_down(self) -> None:
        """Stop watching. The deployment goes on."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def close(self) -> None:
        """The same, and end every port-forward."""
        self.take_down()
        if self._cluster is not None:
            self._cluster.close()
            self.problems += self._cluster.problems
            self._cluster.problems = []

    # -- one cell ------------------------------------------------------------------------------------------

    def _check(self) -> None:
        self._up().check()

    def _disturbances(self) -> tuple[str, ...]:
        return self._cluster.look() if self._cluster is not None else ()

    def _pods(self) -> dict[str, str]:
        if self._cluster is None:
            return {}
        products = self._cluster.products
        return {pod.id: pod.describe(products.get(pod.node, "")) for pod in self._cluster.pods}

    def _processes(self, cell: Cell) -> Processes:
        cores = min(MOST, len(os.sched_getaffinity(0)))
        return processes_for(cell, self._settings["client_processes"], cores)

    def _client(self, cell: Cell) -> tuple[tuple[int, ...], int]:
        return (), self._processes(cell).count

    def shared_cores(self) -> bool:
        return self._deployment.simulated

    def _target(self) -> Target:
        assert self._greeting is not None, "the target was not asked yet"
        access = self._deployment.named.access
        return Target(
            url=self._deployment.named.url,
            model=self._deployment.model,
            api=self._greeting.api,
            vocab=prompt_vocabulary(self._settings["model"] or ""),
            key_env=access.key_env,
            ca_file=access.ca_file,
            verify_tls=access.verify,
            max_context=self._deployment.max_context,
        )

    def greedy_answers(self, length: int, count: int) -> dict[str, tuple[int, ...]]:
        """Greedy tokens through the target and from each named engine alone.

        Raises CannotCompare where there is no second way to ask, or the servers name no tokens.
        """
        named, target = self._deployment.named, self._target()
        if not named.engines:
            raise CannotCompare(
                "no engine behind the target is named (--target-role): there is one way to ask only"
            )
        if target.api != "completions":
            raise CannotCompare(f"roles of {self._deployment.engine} cannot be asked one by one from outside")
        prompt = tuple(100 + (7 * i) % 1009 for i in range(length))
        ways = {THROUGH_THE_ROUTER: named.url}
        ways |= {f"{name}{ALONE}": url.removesuffix("/metrics") for name, url in named.urls.items()}
        try:
            return {
                way: probe(url, self._deployment.model, prompt, count, access=named.access)
                for way, url in ways.items()
            }
        except ProbeError as problem:
            raise CannotCompare(named.access.masked(str(problem))) from None

    # -- provenance ----------------------------------------------------------------------------------------

    def hardware(self) -> Hardware:
        """What the user says, else the address: never the key of numbers that were measured on a launched stack."""
        named = self._deployment.named
        where = named.hardware or named.url.partition("://")[2]
        return Hardware(f"attached {where}", 0, "unknown")

    def launch_record(self) -> LaunchRecord:
        """Provenance of the current launch; of the machine only what is known of it, which is the client's side."""
        assert self._environment is not None, "nothing is attached"
        facts = self._environment.facts
        client = {"client cpu": self._environment.cpu, "client kernel": self._environment.kernel}
        return LaunchRecord(self.hardware(), self._deployment.version, environment={**client, **facts})

    def surroundings(self, launch_id: str) -> Mapping[str, str]:
        """Empty: no canary is run on a machine that is not ours."""
        return {}

    def _read_environment(self) -> Environment:
        named = self._deployment.named
        kept = {name: value for name, value in os.environ.items() if name != self._key_variable}
        environment = read_environment(
            versions={"engine": self._deployment.version, "router": "unknown"},
            environ=kept,
            facts={
                "place": "attached",
                "target": named.url,
                "model": self._deployment.model,
                "hardware": named.hardware or "unknown",
                "tls": named.access.describe(named.url),
                **named.urls,
                **{f"pod of {name}": text for name, text in self._pods().items()},
                **{f"router-{number}": url for number, url in enumerate(named.routers)},
            },
        )
        self._keep_environment(environment)
        return environment


def watched_of(deployment: Deployment, launch_: TopologyLaunch) -> Watched:
    """What evidence may know: every engine of the topology, and addresses of those that are named."""
    topology = launch_.topology
    return Watched(
        kind=topology.kind,
        roles={name: role for name, role, _ in topology.instances},
        urls=deployment.named.urls,
        router_page=next(iter(deployment.named.routers), None),
        asked=topology.kv_transfer.transport if topology.kind is Kind.PD and topology.kv_transfer else "auto",
    )


def _instruments(deployment: Deployment, launch_: TopologyLaunch) -> Instruments:
    """Looks over the network only: counters of this machine's own links say nothing about the deployment's."""
    access, urls = deployment.named.access, deployment.named.urls
    dark: dict[str, Snapshot | Unknown] = {
        name: Unknown(f"its address is not known: give --target-role {role.value}=URL")
        for name, role, _ in launch_.topology.instances
        if name not in urls
    }

    def drain(
        asked: Mapping[str, str], timeout_s: float, before: Mapping[str, Snapshot | Unknown] | None
    ) -> Drain:
        found = wait_drained(
            asked,
            timeout_s,
            before=before,
            poll_s=DRAIN_POLL_S,
            scrape_timeout_s=PAGE_TIMEOUT_S,
            scraper=lambda pages, limit: scrape(pages, limit, access=access),
        )
        return replace(found, snapshots={**found.snapshots, **dark})

    return Instruments(
        drain=drain,
        links=lambda uuids: LinkBytes(),
        page=lambda url: scrape({"router": url}, PAGE_TIMEOUT_S, access=access)["router"],
        look=lambda pages: scrape(pages, MIDWAY_TIMEOUT_S, access=access),
    )
