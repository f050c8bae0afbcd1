"""What every bench does alike, whoever brought its stack up: one stack at a time, measured cell by cell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import orjson

from .errors import RoleDied, TearDownError
from .evidence.cell_evidence import CellEvidence
from .evidence.cell_window import StackWatch
from .evidence.environment import Environment
from .evidence.record import Status
from .gpus.grammar import Device
from .inputs import Inputs
from .load.progress import Progress
from .load.run import LoadError, run_cell
from .load.target import Target
from .measure.cell_result import CellResult
from .measure.mixed import Mixed, compare_streams
from .measure.summarise import summarise
from .narrating import Narrator
from .options import Settings
from .provenance import Hardware, LaunchRecord
from .report.causes import cause_lines
from .report.kv_path import details_of
from .report.outcomes import CellOutcome
from .run_files import RunFiles
from .spec.topology import Kind, Topology
from .spec.workload import Cell
from .stack.running import Serving
from .watching import blame_a_death, told_of_deaths


@dataclass(frozen=True, slots=True)
class TopologyLaunch:
    """One bring-up of a topology: the unit of statistical replication."""

    topology: Topology
    number: int
    reference: bool = False
    """Of the `--reference` build instead of the one under test."""

    @property
    def id(self) -> str:
        """Name of the launch in folders and messages."""
        name = self.topology.name if self.number == 1 else f"{self.topology.name}-launch{self.number}"
        return f"{name}-reference" if self.reference else name

    def with_env(self, **env: str) -> TopologyLaunch:
        """The same launch with more environment variables in every engine."""
        topology = self.topology.model_copy(update={"env": {**self.topology.env, **env}})
        return replace(self, topology=topology)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one cell: its numbers and what the servers say about them."""

    result: CellResult
    seen: CellEvidence
    mixed: Mixed | None = None
    """How the streams of a mixed cell met; None for cells with one stream."""

    def outcome(self, launch: TopologyLaunch, engine: str, nodeid: str = "", order: int = 0) -> CellOutcome:
        """The cell's file before the gate has spoken; `nodeid` is empty where no test item stands for it."""
        result, seen = self.result, self.seen
        details = seen.details() | details_of(launch.topology)
        details |= {"mixed": self.mixed.to_json()} if self.mixed else {}
        return CellOutcome(
            nodeid=nodeid,
            order=order,
            topology=launch.topology.name,
            kind=launch.topology.kind.value,
            engine=engine,
            launch=launch.number,
            result=result,
            verdict="INVALID" if result.invalid or result.ok != result.requests else "",
            rows=(*result.invalid, *cause_lines(seen.naming)),
            naming=seen.naming,
            evidence=seen.evidence.status.value,
            evidence_reasons=seen.evidence.reasons,
            ttft_split=seen.split,
            details=details | ({"build": "reference"} if launch.reference else {}),
        )


def room_of(cell: Cell) -> int:
    """Bytes of disk that a cell's records take, from above: prompts as JSON numbers, three stamps for each token, and
    twice that where several processes leave parts of it.
    """
    requests = sum(
        (stream.requests + cell.warmups) * (4096 + 8 * stream.input_tokens[1] + 48 * stream.output_tokens)
        for stream in cell.streams
    )
    return 2**18 + requests


S_co = TypeVar("S_co", bound=Serving, covariant=True)


class Measuring(ABC, Generic[S_co]):
    """A bench as the session sees it. All methods are called from pytest's main thread."""

    relaunches = True
    """False where `begin` cannot bring up anything fresh, so that stage 2 can only measure the same stack again."""

    def __init__(
        self, settings: Settings, inputs: Inputs, run_id: str, files: RunFiles, tell: Narrator
    ) -> None:
        self.devices: tuple[Device, ...] = ()
        self.launch_lines: list[str] = []
        self.problems: list[str] = []
        self._settings = settings
        self._inputs = inputs
        self._run_id = run_id
        self._files = files
        self._tell = tell
        self._selected: tuple[TopologyLaunch, ...] = ()
        self._launch: TopologyLaunch | None = None
        self._stack: S_co | None = None
        self._watch: StackWatch | None = None
        self._environment: Environment | None = None
        self.bring_ups: dict[str, float] = {}
        """Topology -> seconds of its latest bring-up, its canary included."""
        self._adopted: dict[str, Mapping[str, str]] = {}

    # -- what a bench has to know ----------------------------------------------------------------------------

    @abstractmethod
    def lease_gpus(self) -> None:
        """Keep other runs away from the devices; in the process that starts workers, for all of them.

        Raises UsageProblem.
        """

    @abstractmethod
    def prepare(self, launches: Sequence[TopologyLaunch]) -> None:
        """Check what the selected launches need, before anything is measured. Raises UsageProblem."""

    @abstractmethod
    def describe(self) -> list[str]:
        """Lines for `--plan`."""

    @abstractmethod
    def _bring_up(self) -> None:
        """Set the current launch's stack, its watch and its environment, and announce it. Raises BringUpError."""

    @abstractmethod
    def _forget(self) -> str:
        """A part of the stack has died: what was known of it is no longer true. Returns what comes next, in words."""

    @abstractmethod
    def take_down(self) -> None:
        """Let go of the current stack, if any. Raises TearDownError."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; safe to call more than once."""

    @abstractmethod
    def greedy_answers(self, length: int, count: int) -> dict[str, tuple[int, ...]]:
        """Way -> greedy tokens of one fixed prompt. Raises CannotCompare where there are no two ways to ask."""

    @abstractmethod
    def hardware(self) -> Hardware:
        """What the numbers of this run are measured on."""

    @abstractmethod
    def launch_record(self) -> LaunchRecord:
        """Provenance of the current launch, kept with every stored baseline."""

    @abstractmethod
    def surroundings(self, launch_id: str) -> Mapping[str, str]:
        """What a launch's canaries said of the machine; empty for a launch of another run."""

    @abstractmethod
    def _target(self) -> Target:
        """Where the load goes."""

    @abstractmethod
    def _check(self) -> None:
        """Called about ten times a second while a cell runs. Raises RoleDied."""

    @abstractmethod
    def _client(self, cell: Cell) -> tuple[tuple[int, ...], int]:
        """Cores for the client, empty for any, and how many processes it is."""

    def _disturbances(self) -> tuple[str, ...]:
        """What happened beside the cell that makes it invalid."""
        return ()

    def _beside(self) -> str:
        """What goes on beside a cell that begins now and may disturb it; empty for nothing."""
        return ""

    def _unknown(self) -> tuple[str, ...]:
        """What nobody could look at while a cell ran, one line each."""
        return ()

    def shared_cores(self) -> bool:
        """Whether the client shares its cores with the engines."""
        return False

    # -- what all benches do -------------------------------------------------------------------------------

    @property
    def selected(self) -> tuple[TopologyLaunch, ...]:
        """The launches that `prepare` was given."""
        return self._selected

    @property
    def launch(self) -> TopologyLaunch:
        """The current launch."""
        assert self._launch is not None, "no topology has begun"
        return self._launch

    def begin(self, launch_: TopologyLaunch) -> None:
        """Make a launch the current one. Nothing starts yet."""
        self.take_down()
        self._launch = launch_

    def stack(self) -> S_co:
        """The current launch's stack, up and warm: the one that lives, else another. Raises BringUpError."""
        if self._stack is not None:
            try:
                self._stack.check()
                return self._stack
            except RoleDied as death:
                self._tell(f"{self.launch.id}: {death.instance} {death.reason}; {self._forget()}")
                self.take_down()
        try:
            self._bring_up()
        except BaseException:
            if self._stack is not None:
                self.drop()  # up, and nobody watches it
            raise
        return self._up()

    def _up(self) -> S_co:
        assert self._stack is not None, "nothing is up"
        return self._stack

    def _announce(self, line: str) -> None:
        """Say that the launch is up, now and in the run's summary."""
        self.launch_lines.append(line)
        self._tell(line)

    def drop(self) -> None:
        """Take down where nobody could take the error: what is left becomes a problem of the run's summary."""
        try:
            self.take_down()
        except TearDownError as left:
            self.problems += str(left).splitlines()

    def bring_up_s(self, topology: str) -> float | None:
        """How long the topology's latest bring-up took in seconds, its canary included; None before the first."""
        return self.bring_ups.get(topology)

    def adopt(self, surroundings: Mapping[str, Mapping[str, str]], bring_ups: Mapping[str, float]) -> None:
        """Take over what a worker of this run has seen of its launches."""
        self._adopted.update(surroundings)
        self.bring_ups.update(bring_ups)

    def _keep_environment(self, environment: Environment) -> None:
        """Leave what the current launch ran on and with in the run's folder."""
        page = orjson.dumps(environment.to_json(), option=orjson.OPT_INDENT_2)
        self._files.put(self._files.folder / "environment" / f"{self.launch.id}.json", page)

    def measure(self, cell: Cell, workload: str) -> Measured:
        """Run a cell with evidence around it. Raises RoleDied at once when a process of the stack ends.

        Raises CannotKeep, before anything is sent where that is known by then, when the disk has no room for it.
        """
        self._files.make_room(f"{self.launch.id} {cell.id}", room_of(cell))
        stack = self.stack()
        topology = self.launch.topology
        assert self._watch is not None, "a stack that nobody watches"

        def check() -> None:
            self._check()
            self._tell.tick()

        def progress(progress: Progress) -> None:
            self._tell.progress(progress)
            if progress.phase == "measure" and 2 * progress.done >= progress.total:
                window.midway()

        cpus, processes = self._client(cell)
        beside = self._beside()
        with self._tell.measuring(self.launch.id, cell.id), self._watch.cell() as window, told_of_deaths():
            try:
                records = run_cell(
                    self._target(),
                    cell,
                    seed=self._settings["workload_seed"],
                    salt=f"{self._run_id}/{self.launch.number}/{workload}/{cell.id}",
                    out_dir=self._files.folder / "records" / self.launch.id / cell.id,
                    on_progress=progress,
                    check=check,
                    cpus=cpus,
                    processes=processes,
                )
            except (LoadError, OSError):
                self._files.make_room(f"{self.launch.id} {cell.id}", room_of(cell))  # names a full disk
                raise
            blame_a_death(stack, records)
            seen = window.judge(records)
        result = summarise(records, cell, topology.name, shared_cores=self.shared_cores())
        evidence, invalid = seen.evidence, [*seen.problems, *self._disturbances()]
        required = topology.kind is Kind.PD and self._settings["require_evidence"] == "yes"
        if required and evidence.status is not Status.PROVEN and not evidence.problems:
            invalid += [
                f"evidence: {evidence.summary}",
                *(f"evidence: {reason}" for reason in evidence.reasons),
            ]
        result = replace(
            result,
            invalid=(*result.invalid, *invalid),
            warnings=(*result.warnings, *seen.warnings, *self._unknown(), *([beside] if beside else [])),
        )
        return Measured(result, seen, compare_streams(records, cell))

    def measure_cell(self, cell_id: str, workload: str) -> Measured:
        """Run a cell of the workload by its id, for a fresh launch that no test item stands for."""
        cell = next(cell for cell in self._inputs.workload.cells if cell.id == cell_id)
        return self.measure(cell, workload)
