"""The nodes of a Slurm job as the place of a run: asks for the job, gives every instance its node, gives it back."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from .errors import UsageProblem
from .evidence.canary import Canaries, Canary
from .gpus.foreign import ForeignUse
from .gpus.grammar import Device
from .gpus.inventory import Inventory
from .gpus.placement import Placed, Placement
from .provenance import Hardware
from .spec.topology import Topology
from .stack.launcher import Launcher
from .stack.ports import PortRegistry, port_window
from .stack.slurm.asking import Size, Wish, forecast, salloc
from .stack.slurm.client import PLACE, Slurm, asked, check_version, slurm
from .stack.slurm.job import OVER, Job, JobHolder, JobNode, job_state, owner_comment, read_job
from .stack.slurm.launcher import NodeFacts, SlurmLauncher, ask_nodes, describe_share
from .stack.slurm.nodes import Need, fewest_nodes, loads, needs_of, read_nodes, spread
from .stack.slurm.sharing import cpus_wanted, shares_of

PORTS_OF_A_JOB = 64
"""Distance between the first ports that two jobs with neighbouring numbers try."""

NO_CANARY = "none: the nodes of a Slurm job are not timed"
NOT_LOOKED = (
    "GPUs: clocks, throttling, memory and other processes are unknown, as no node of a Slurm job is asked"
)


class SlurmSite:
    """One job for the whole run, as large as its largest topology, or the job that pytest runs in."""

    here = False
    devices: tuple[Device, ...] = ()

    def __init__(
        self,
        *,
        wish: Wish,
        gres: str,
        gpus: bool,
        simulated: bool,
        wait_s: float,
        run_id: str,
        log: Path,
        tell: Callable[[str], None],
        run: Slurm = slurm,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.inventory = Inventory(problem="Slurm hands the GPUs out; their driver is not asked")
        self.gpu_mib: dict[str, int] = {}
        self.ports = PortRegistry()
        self.unknown: tuple[str, ...] = (NOT_LOOKED,) if gpus and not simulated else ()
        self._wish, self._gres, self._gpus, self._simulated = wish, gres, gpus, simulated
        self._wait_s, self._run_id, self._log, self._tell, self._run = wait_s, run_id, log, tell, run
        self._environ = os.environ if environ is None else environ
        self._version = "unknown"
        self._needs: dict[str, tuple[Need, ...]] = {}
        self._where: dict[str, dict[str, int]] = {}
        """Topology -> instance id -> number of its node in the job."""
        self._size: Size | None = None
        self._holder: JobHolder | None = None
        self._job: Job | None = None
        self._facts: dict[str, NodeFacts] = {}

    @property
    def _inside(self) -> str | None:
        """The job that pytest runs in."""
        return self._environ.get("SLURM_JOB_ID")

    # -- before anything starts ----------------------------------------------------------------------------

    @property
    def wiring(self) -> Inventory:
        """Nothing is known of it."""
        return self.inventory

    def prepare(self, topologies: Sequence[Topology], *, in_turn: bool) -> None:
        """Ask Slurm what nodes there are, and fit every topology on them."""
        self._version = check_version(self._run)
        for topology in topologies:
            self._needs[topology.name] = needs_of(topology, gpus=self._gpus)
        if self._inside is None:
            self._size = self._ask_for(topologies)
            rooms = [self._size.gpus if self._gpus else 10**6] * self._size.nodes
            # Until the job is there: nodes by number, each with what is asked for.
            nodes = tuple(JobNode(f"NODE{i}", self._size.cpus, self._size.gpus) for i in range(len(rooms)))
            self._job = Job("JOB", nodes, ours=True)
        else:
            if self._wish != Wish():
                raise UsageProblem(
                    f"--slurm-arg: pytest runs inside Slurm job {self._inside}, whose size is decided; leave it out, "
                    "or start pytest outside of a job"
                )
            self._job = read_job(self._run, self._inside, gres=self._gres, ours=False)
            rooms = [node.gpus if self._gpus else 10**6 for node in self._job.nodes]
        for name, needs in self._needs.items():
            self._where[name] = self._fit(name, needs, rooms)

    def _ask_for(self, topologies: Sequence[Topology]) -> Size:
        nodes = read_nodes(self._run, self._wish.partition)
        room = max(node.count(self._gres) for node in nodes)
        if self._gpus and room == 0:
            offered = sorted({name for node in nodes for name in node.gres}) or ["none"]
            raise UsageProblem(
                f"--slurm-gres {self._gres}: no node of partition {nodes[0].partition} has it; sinfo lists "
                f"{', '.join(offered)}; name one of them, another partition (--slurm-arg partition=NAME), or --gpus cpu"
            )
        fitting = [node for node in nodes if node.count(self._gres) == room] if self._gpus else list(nodes)
        smallest = min(fitting, key=lambda node: node.cpus)
        count, load, steps = 1, 0, 0
        for topology in topologies:
            needs = self._needs[topology.name]
            most = room if self._gpus else sum(need.size for need in needs)
            wanted = max(self._wish.nodes or 1, fewest_nodes(needs, most, topology.name))
            where = spread(needs, [most] * wanted)
            assert where is not None, "more nodes than enough"
            count = max(count, wanted)
            load = max(load, *loads(needs, where).values())
            steps = max(steps, *(list(where.values()).count(node) for node in where.values()))
        cpus = cpus_wanted(smallest.cpus, room if self._gpus else 0, load, steps)
        return Size(count, load if self._gpus else 0, cpus, self._gres)

    def _fit(self, topology: str, needs: Sequence[Need], rooms: Sequence[int]) -> dict[str, int]:
        """On as few of the nodes as it takes, unless the user named their number."""
        first = len(rooms) if self._wish.nodes or self._inside else 1
        for count in range(first, len(rooms) + 1):
            where = spread(needs, rooms[:count])
            if where is not None:
                return where
        total = sum(need.size for need in needs)
        raise UsageProblem(
            f"topology {topology} needs {total} GPUs ({self._gres}), Slurm job {self._inside} has "
            f"{' + '.join(str(room) for room in rooms)}; ask for more, or choose a smaller topology"
        )

    def reserve(self) -> None:
        """Wait for the job to start, and ask its nodes for their addresses."""
        if self._inside is None:
            assert self._size is not None, "not prepared"
            command = salloc(self._size, self._wish, name=f"pdperf-{self._run_id}", comment=owner_comment())
            self._holder = JobHolder(
                command, self._run, log=self._log, run_id=self._run_id, environ=self._environ
            )
            number = self._holder.wait(self._wait_s, self._tell)
            self._job = read_job(self._run, number, gres=self._gres, ours=True)
        job = self._job
        assert job is not None, "not prepared"
        self._facts = ask_nodes(self._run, job)
        check_addresses(self._facts)
        window = port_window()
        start = window.start + int(job.id) * PORTS_OF_A_JOB % len(window)
        self.ports = PortRegistry(window=window, start=start)
        self._tell(self._job_line(job))

    def _job_line(self, job: Job) -> str:
        names = ", ".join(
            f"{node.name} ({node.gpus} GPUs, {node.cpus} CPUs)"
            if self._gpus
            else f"{node.name} ({node.cpus} CPUs)"
            for node in job.nodes
        )
        ends = f", until {job.ends}" if job.ends else ", without a time limit"
        return f"Slurm job {job.id} on {names}{ends}"

    def hold(self) -> None:
        """Nothing: every worker asks for a job of its own."""

    def take_turn(self) -> None:
        """Nothing: see `hold`."""

    def end_turn(self) -> None:
        """Nothing: see `hold`."""

    def check(self) -> None:
        """Raise UsageProblem when the job has ended, such as at its time limit."""
        job = self._job
        if job is None:
            return
        state = job_state(self._run, job.id)
        if state.name in OVER or (self._holder is not None and self._holder.ended):
            why = self._holder.said() if self._holder is not None else state.reason
            raise UsageProblem(
                f"{PLACE}: job {job.id} has ended ({state.name or 'no longer known'}: {why}); "
                "give it more time with --slurm-arg time=TIME, and go on with --resume"
            )

    # -- what is where -------------------------------------------------------------------------------------

    def placement(self, topology: str) -> Placement:
        """No devices: nobody but Slurm knows which they are."""
        shares = self._launcher(topology).shares
        return Placement(
            tuple(
                Placed(need.id, need.role, (), None, "", describe_share(shares[need.id]))
                for need in self._needs[topology]
            )
        )

    def explain(self, topology: str) -> list[str]:
        """Node and share of every instance and of the router."""
        return [f"{id}: {describe_share(share)}" for id, share in self._launcher(topology).shares.items()]

    def visible(self, topology: Topology) -> Mapping[str, tuple[str, ...]]:
        """Numbers within the instance's own step, which Slurm replaces by its choice."""
        if self._simulated:
            return {need.id: () for need in self._needs[topology.name]}
        return {
            need.id: tuple(str(i) for i in range(need.size)) if self._gpus else ("cpu",)
            for need in self._needs[topology.name]
        }

    def launcher(self, topology: Topology) -> Launcher:
        """Steps of the job."""
        return self._launcher(topology.name)

    def _launcher(self, topology: str) -> SlurmLauncher:
        assert self._job is not None, "not prepared"
        shares = shares_of(
            self._needs[topology], self._where[topology], self._job, self._gres, gpus=self._gpus
        )
        addresses = {name: facts.address for name, facts in self._facts.items()}
        return SlurmLauncher(self._run, self._job, shares, addresses)

    def describe(self) -> list[str]:
        """The job that would be asked for, and when Slurm expects it to start."""
        lines = [f"slurm {self._version}"]
        if self._size is None:
            assert self._job is not None, "not prepared"
            return [*lines, f"  inside of it: {self._job_line(self._job)}"]
        command = salloc(self._size, self._wish, name=f"pdperf-{self._run_id}", comment=owner_comment())
        answer = self._run(*forecast(self._size, self._wish))
        if answer.code != 0:
            raise UsageProblem(
                f"{PLACE}: Slurm would refuse the job: {answer.said}\n  asked with: {shlex.join(command)}"
            )
        said = re.sub(r"Job \d+", "the job", answer.said.removeprefix("sbatch: "))
        return [
            *lines,
            f"  {shlex.join(command)}",
            f"  Slurm expects {said}",
            "  JOB and NODE0.. are known once it runs",
        ]

    # -- what it is ----------------------------------------------------------------------------------------

    def hardware(self) -> Hardware:
        """By Slurm's names, which mean something on one cluster only, so that its own name is part of them."""
        nodes = self._job.nodes if self._job is not None else ()
        link = "loopback" if len(nodes) == 1 else f"{len(nodes)} nodes"
        if self._simulated:
            return Hardware("simulated", 0, link)
        facts = next(iter(self._facts.values()), None)
        if not self._gpus:
            return Hardware(f"cpu {facts.cpu if facts else 'unknown'}", sum(n.cpus for n in nodes), link)
        types = sorted({name for node in nodes for name in node.gres_types}) or [self._gres]
        count = max((sum(need.size for need in needs) for needs in self._needs.values()), default=0)
        config = asked(self._run, "scontrol", "show", "config")
        cluster = re.search(r"^ClusterName\s*=\s*(\S+)", config, re.MULTILINE)
        name = " + ".join(types)
        model = name if ":" in name else f"{name} of unknown model"
        return Hardware(f"{cluster[1] if cluster else 'unknown'} {model}", count, link)

    def facts(self) -> Mapping[str, str]:
        """What the nodes said, in place of what this machine would say of itself."""
        job = self._job
        facts = list(self._facts.values())
        if job is None or not facts:
            return {}
        return {
            "launcher": f"slurm {self._version}",
            "nodes": str(len(job.nodes)),
            "cpu": " + ".join(sorted({one.cpu for one in facts})),
            "kernel": " + ".join(sorted({one.kernel for one in facts})),
            "slurm_gpus": ", ".join(
                f"{node.gpus} x {'/'.join(node.gres_types) or 'none'}" for node in job.nodes
            ),
        }

    def canaries(self, take: Callable[[], Canary], *, off: str, say: Callable[..., None]) -> Canaries:
        """None: this machine's speed says nothing about the nodes'."""
        return Canaries(None, say, NO_CANARY)

    def foreign(
        self, own_pids: Callable[[], Collection[int]], only: Collection[str] | None = None
    ) -> ForeignUse:
        """Looks at nothing: see `unknown`."""
        return ForeignUse((), own_pids)

    def wait_emptied(self, besides: Collection[str] = ()) -> tuple[str, ...]:
        """Nothing to wait for that could be seen: see `unknown`."""
        return ()

    def release(self) -> tuple[str, ...]:
        """Give back a job that we asked for; one that pytest runs in goes on."""
        self.ports.close()
        holder, self._holder = self._holder, None
        return holder.release() if holder is not None else ()


def check_addresses(facts: Mapping[str, NodeFacts]) -> None:
    """Raise UsageProblem when one node of several calls itself by its loopback address, as /etc/hosts may say."""
    loopback = [name for name, one in facts.items() if one.address.startswith("127.")]
    if loopback and len(loopback) < len(facts):
        raise UsageProblem(
            f"{PLACE}: node {loopback[0]} has the address {facts[loopback[0]].address} here, where no other "
            "node reaches it; give its name an address of the network (/etc/hosts, NodeAddr), or start pytest outside "
            "of the job"
        )
