"""Starts the roles of one topology as steps of a running job, each on its node with its share of CPUs and GPUs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from pytest_pdperf.engines.base import Command
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.stack.launcher import RoleProcess
from pytest_pdperf.stack.slurm.client import PLACE, Slurm, asked
from pytest_pdperf.stack.slurm.job import Job
from pytest_pdperf.stack.slurm.step import Share, SlurmStep, step_command

ROUTER = "router"

_CAUSE = re.compile(
    r"DUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE|MEMORY LIMIT)|[Oo]ut [Oo]f [Mm]emory|oom[-_ ]kill"
    r"|\*\*\* (?:STEP|JOB) .*CANCELLED|(?:Force Terminated|Terminating) StepId|Unable to create step"
    r"|exec: .*not found|execve\(\): |Node failure|Socket timed out|Invalid job id"
)
_WAITING = re.compile(r"srun: .*step creation (?:temporarily disabled|still disabled)")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node said of itself."""

    node: str
    address: str
    taken: tuple[int, ...] = ()
    cpu: str = ""
    cpus: int = 0
    kernel: str = ""


def ask_nodes(
    run: Slurm,
    job: Job,
    *,
    ports: Mapping[str, Sequence[int]] | None = None,
    python: str = sys.executable,
) -> dict[str, NodeFacts]:
    """Ask every node of a job for its address and for ports, with one step beside all others.

    Raises UsageProblem, quoting Slurm, when a node does not answer.
    """
    source = (resources.files(__package__) / "probe.py").read_text()
    question = json.dumps({node: list(numbers) for node, numbers in (ports or {}).items()})
    count = str(len(job.nodes))
    out = asked(
        run,
        *("srun", f"--jobid={job.id}", "--job-name=pdperf-probe", f"--nodes={count}", f"--ntasks={count}"),
        *("--ntasks-per-node=1", "--overlap", "--mem=0", "--gres=none", "--mpi=none", "--input=none"),
        *(python, "-I", "-S", "-c", source, question),
    )
    found: dict[str, NodeFacts] = {}
    for line in out.splitlines():
        if line.startswith("pdperf-node "):
            row = json.loads(line.removeprefix("pdperf-node "))
            facts = NodeFacts(**{**row, "taken": tuple(row["taken"])})
            found[facts.node] = facts
    silent = [node.name for node in job.nodes if node.name not in found]
    if silent:
        raise UsageProblem(f"{PLACE}: node {', '.join(silent)} of job {job.id} did not answer the probe")
    return found


@dataclass(frozen=True)
class SlurmLauncher:
    """Knows for every instance and the router on which node it runs and what it takes there."""

    run: Slurm
    job: Job
    shares: Mapping[str, Share]
    """Instance id, and `router`."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Node -> address; the name of the node where it is not known yet (`--plan`)."""
    name = "slurm"

    def start(
        self,
        id: str,
        command: Command,
        *,
        log: Path,
        run_id: str,
        cpus: Sequence[int] = (),
        base: Mapping[str, str] | None = None,
    ) -> RoleProcess:
        """Start it behind srun, which a reaper watches. Slurm binds CPUs, so `cpus` has no meaning here."""
        whole = self._command(id, command, base)
        return SlurmStep(id, whole, self.run, node=self.shares[id].node, log=log, run_id=run_id, base=base)

    def shown(self, id: str, command: Command) -> Command:
        """srun and what it runs."""
        return self._command(id, command, None)

    def _command(self, id: str, command: Command, base: Mapping[str, str] | None) -> Command:
        hosts = tuple(dict.fromkeys(self.host(name) for name in self.shares))
        return step_command(self.job.id, id, self.shares[id], command, hosts, base)

    def host(self, id: str) -> str:
        """The node's address on the way to this machine: by it roles reach each other, and the client the router."""
        node = self.shares[id].node
        return self.addresses.get(node, node)

    def where(self, id: str, devices: Sequence[str]) -> str:
        """Node and share."""
        return describe_share(self.shares[id])

    def taken(self, ports: Sequence[tuple[str, str, int]]) -> tuple[str, ...]:
        """Ask the nodes to listen on each port for a moment."""
        wanted: dict[str, list[int]] = {}
        for id, _, port in ports:
            wanted.setdefault(self.shares[id].node, []).append(port)
        facts = ask_nodes(self.run, self.job, ports=wanted)
        return tuple(
            f"{id}: {what} port {port} is taken on {self.shares[id].node}"
            for id, what, port in ports
            if port in facts[self.shares[id].node].taken
        )

    def stage(self, line: str) -> str | None:
        """srun says when it waits for other steps to end."""
        return "waiting for a place in the Slurm job" if _WAITING.search(line) else None

    def cause(self, lines: Sequence[str]) -> str | None:
        """What Slurm says it did or could not do."""
        said = [line for line in lines if line.startswith(("srun:", "slurmstepd", "pdperf: "))]
        return next((line for line in said if _CAUSE.search(line)), None)


def describe_share(share: Share) -> str:
    """`node n1: 2 GPUs that Slurm chooses, 4 CPUs`."""
    gpus = f"{share.gpus} GPU{'s' if share.gpus > 1 else ''} that Slurm chooses" if share.gpus else "no GPU"
    return f"node {share.node}: {gpus}, {share.cpus} CPUs"
