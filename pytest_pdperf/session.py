"""Wires the rooms for one pytest run: brings stacks up, measures cells, asks the gate, keeps the results."""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from .attached import AttachedBench
from .bench import Bench
from .confirming import Confirming, kept_in
from .errors import UsageProblem
from .forecast import estimate_of, remaining_of
from .gate.paired import Expectation
from .gpus.grammar import Device
from .inputs import Inputs, read_inputs
from .judging import JudgedCell, Judging
from .measure.cell_result import CellResult
from .measuring import Measured, Measuring, TopologyLaunch
from .narrating import Narrator
from .options import BY_NAME, Settings
from .overlap import possible_here
from .project import ROOM_TO_BEGIN, make_folder, project_root
from .report.causes import cause_lines, explained
from .report.outcomes import CellOutcome, RunSummary, file_of, load, settled
from .report.ttft_stage import circumstances
from .run_files import CELLS, RunFiles
from .sites import site_for
from .spec.topology import Topology
from .spec.workload import Cell
from .stack.eta import CellKey
from .stack.running import Serving
from .terminal_screen import PytestScreen

ONLY_THIS_RUN = frozenset({"update_baselines", "baseline_reason", "plan", "compare", "resume"})
"""Options that a command to re-run one cell leaves out."""


@dataclass
class Session:
    """The state of one measuring pytest process. Its fixtures are thin views of it."""

    settings: Settings
    inputs: Inputs
    run_id: str
    files: RunFiles
    bench: Measuring[Serving]
    judging: Judging
    confirming: Confirming
    tell: Narrator
    worker: str = ""
    """Name of the xdist worker, empty without xdist and in xdist's controller."""
    gathers: bool = False
    """True in xdist's controller, which measures nothing but fresh launches."""

    def __post_init__(self) -> None:
        self.measured: dict[str, Measured] = {}
        """Item -> its latest measurement."""
        self._outcomes: dict[tuple[str, str, int], CellOutcome] = {}
        self._order: dict[str, int] = {}
        self._finished = False
        self._unwritten = False
        self._changes: tuple[str, ...] = ()

    GREEDY_TOKENS = 16

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.files.folder

    # -- pytest's view -------------------------------------------------------------------------------------

    def header(self) -> list[str]:
        """Effective settings, for the top of pytest's output."""
        inputs = self.inputs
        engines = ", ".join(sorted({engine.name for engine in inputs.engines.values()}))
        simulated = " (SIMULATED)" if inputs.simulated else ""
        names = ", ".join(topology.name for topology in inputs.topologies)
        place = f"gpus {self.settings['gpus'] or 'none'}"
        if inputs.deployment is not None:
            place = f"attached to {inputs.deployment.named.url}"
        shown = " ".join(self._words(self.settings.given - {"engine", "gpus", "target"}))
        return [
            f"pdperf: run {self.run_id}, engine {engines}{simulated}, {place}, model {inputs.model}",
            f"pdperf: topologies {names}; workload {inputs.workload.name} ({len(inputs.workload.cells)} cells)"
            + (f"; {shown}" if shown else ""),
        ]

    def finished(self, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        """Items that the run to be resumed has measured already and that need no second look."""
        if not self.settings["resume"]:
            return []
        kept = {outcome.nodeid: outcome for outcome in settled(self._load()[0])}
        done = [item for item in items if item.nodeid in kept]
        self._outcomes |= {(o.topology, o.result.cell, o.launch): o for o in kept.values()}
        red = f", {sum(self.kept())} of them red" if any(self.kept()) else ""
        self.bench.problems.append(f"resumed: {len(kept)} cells kept from run {self.run_id}{red}")
        return done

    def kept(self) -> list[bool]:
        """For each cell kept from the run to be resumed, whether it makes the run red."""
        cells = settled(self._load()[0]) if self.settings["resume"] else []
        return [cell.red(self.judging.require_baseline) for cell in cells]

    def prepare(self, items: Sequence[pytest.Item]) -> None:
        """Check what the selected items need. Raises UsageProblem before anything starts."""
        launches: dict[str, TopologyLaunch] = {}
        cells: dict[CellKey, tuple[TopologyLaunch, Cell]] = {}
        for number, item in enumerate(items):
            self._order[item.nodeid] = number
            if item.get_closest_marker("skip") is not None:
                continue  # needs nothing, and has no turn
            callspec = getattr(item, "callspec", None)
            params = callspec.params if callspec else {}
            launch, cell = params.get("topology"), params.get("cell")
            if isinstance(launch, TopologyLaunch):
                launches.setdefault(launch.id, launch)
                if isinstance(cell, Cell):
                    cells[launch.id, cell.id] = (launch, cell)
        self.tell.plan(tuple(cells), lambda: remaining_of(self.inputs, cells, self.folder.parent))
        self.bench.prepare(tuple(launches.values()))
        if launches:
            self.judging.prepare([launch.topology for launch in launches.values()], self.bench.hardware())

    def claims(self) -> tuple[Expectation, ...]:
        """Expectations that are about this run: both topologies and at least one cell of the workload."""
        inputs = self.inputs
        names = {topology.name for topology in inputs.topologies}
        return tuple(
            claim
            for claim in inputs.expectations
            if {claim.candidate, claim.reference} <= names
            and any(claim.applies(inputs.workload.name, cell.id) for cell in inputs.workload.cells)
        )

    def describe_plan(self) -> list[str]:
        """Lines for `--plan`."""
        cells = [
            f"  {cell.id}: {sum(s.requests for s in cell.streams)} requests"
            for cell in self.inputs.workload.cells
        ]
        return [
            *self.bench.describe(),
            f"workload {self.inputs.workload.name}:",
            *cells,
            estimate_of(self.inputs, self.bench.selected, self.folder.parent).describe(),
            "nothing was started (--plan)",
        ]

    # -- the fixtures' view --------------------------------------------------------------------------------

    @property
    def devices(self) -> tuple[Device, ...]:
        """Devices given with `--gpus`."""
        return self.bench.devices

    def begin_launch(self, launch: TopologyLaunch) -> None:
        """Make `launch` the current one; it comes up when its first test asks for the stack."""
        self.bench.begin(launch)

    def stack(self) -> Serving:
        """The current launch's stack, brought up if need be. Raises BringUpError, and CannotKeep on a full disk."""
        self.files.make_room(self.bench.launch.id, ROOM_TO_BEGIN)
        return self.bench.stack()

    def take_down(self) -> None:
        """Stop the current stack."""
        self.bench.take_down()

    def measure(self, nodeid: str, topology: Topology, cell: Cell) -> CellResult:
        """Run a cell on the current stack and keep its result before anything else begins: on disk, if it can be."""
        measured = self.bench.measure(cell, self.inputs.workload.name)
        engine = self.inputs.engines[topology.name].name
        self._keep(measured.outcome(self.bench.launch, engine, nodeid, self._order.get(nodeid, 0)))
        self.measured[nodeid] = measured
        return measured.result

    def outcome_of(self, topology: Topology, cell: Cell) -> CellOutcome | None:
        """What the current launch of a topology has measured of a cell, None when it has not."""
        return self._outcomes.get((topology.name, cell.id, self.bench.launch.number))

    def judge(self, nodeid: str, topology: Topology, result: CellResult) -> str:
        """Hold a result against its baseline; returns the failure message, empty when nothing blocks."""
        outcome = self._outcomes[(topology.name, result.cell, self.bench.launch.number)]
        record = self.bench.launch_record()
        record = replace(record, environment={**record.environment, **circumstances(outcome)})
        cell = self.judging.judge(topology, result, record, self.bench.launch.number)
        if not self.confirming.enabled:
            self.confirming.settle(cell)
        self._show(cell)
        problem = "" if self.confirming.pending(cell) else self._message(cell)
        return "\n".join(part for part in (problem, self.files.trouble()) if part)

    def awaits_confirmation(self, nodeid: str) -> bool:
        """True while an item's verdict is SUSPECT and fresh launches will decide it."""
        return any(o.nodeid == nodeid and o.open for o in self._outcomes.values())

    def confirm(self) -> dict[str, str]:
        """Stage 2: item -> its failure message, empty where fresh launches cleared it.

        Workers leave it to the controller, so that all suspects of the run are decided together.
        """
        if self.worker:
            return {}
        if self.gathers:
            self._gather()
        settled = self.confirming.run()
        for cell in settled:
            self._show(cell)
        return {self._outcome(cell).nodeid: self._message(cell) for cell in settled}

    def _gather(self) -> None:
        """Make the workers' cells this process's own. Raises UsageProblem when their devices are gone."""
        outcomes, _ = self._load()
        self._outcomes |= {(o.topology, o.result.cell, o.launch): o for o in outcomes}
        self.judging.cells.sort(key=lambda cell: self._outcome(cell).order)
        topologies = {cell.topology.name: cell.topology for cell in self.judging.cells}
        if topologies:
            self.bench.prepare([TopologyLaunch(topology, 1) for topology in topologies.values()])
            self.judging.prepare(list(topologies.values()), self.bench.hardware())

    def _outcome(self, cell: JudgedCell) -> CellOutcome:
        return self._outcomes[(cell.topology.name, cell.result.cell, cell.launch)]

    def _show(self, cell: JudgedCell) -> None:
        """Bring the cell's file up to date with the gate's answer."""
        launches = cell.baseline.launches if cell.baseline else ()
        outcome = self._outcome(cell)
        told = explained(cell.verdict, outcome, [launch.environment for launch in launches])
        verdict = cell.verdict = told.verdict
        cell.causes = told.more
        self._keep(
            replace(
                outcome,
                verdict=verdict.verdict.value,
                rows=cell.notable,
                judged=verdict.rows,
                naming=told.naming,
                details=outcome.details_when(cell.accepted),
            )
        )

    def _message(self, cell: JudgedCell) -> str:
        problem = self.judging.problem(cell)
        if not problem:
            return ""
        lines = [problem]
        if fresh := self.confirming.kept(cell):
            lines += ["what the fresh launches measured:", *(f"  {path}" for path in fresh)]
        lines += ["re-run just this cell:", f"  {self.rerun(self._outcome(cell).nodeid)}"]
        return "\n".join(lines)

    def greedy_answers(self, length: int) -> dict[str, tuple[int, ...]]:
        """Greedy tokens for one fixed prompt by every way to reach an engine, and from earlier topologies."""
        return self.bench.greedy_answers(length, self.GREEDY_TOKENS)

    def rerun(self, nodeid: str) -> str:
        """The command that runs one item again with the same settings."""
        return shlex.join(["pytest", nodeid, *self._words(self.settings.given - ONLY_THIS_RUN)])

    def _words(self, names: Iterable[str]) -> list[str]:
        """Options as they would be typed."""
        words = []
        for name in sorted(names):
            option, value = BY_NAME[name], self.settings[name]
            if option.kind == "flag":
                words.append(option.flag)
            else:
                words += [f"{option.flag}={part}" for part in (value if option.kind == "list" else (value,))]
        return words

    def properties_of(self, nodeid: str) -> list[tuple[str, object]]:
        """JUnit properties of a measured item."""
        for outcome in self._outcomes.values():
            if outcome.nodeid == nodeid:
                values = [
                    (name, value.value)
                    for name, value in outcome.result.metrics.items()
                    if value.value is not None
                ]
                causes = [("pdperf_cause", line) for line in cause_lines(outcome.naming, mark="")]
                told = [("pdperf_verdict", outcome.verdict), ("pdperf_evidence", outcome.evidence)]
                return [*told, *causes, *values]
        return []

    # -- the end -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Take the stack down and write baselines and history, once."""
        if self._finished:
            return
        self._finished = True
        self.bench.close()
        if self.worker:
            return
        self._attempt("history", self.judging.append_history)
        self._attempt("baselines", self._update_baselines)
        if trouble := self.files.trouble(ended=True):
            self._unwritten = True
            self.bench.problems += trouble.splitlines()

    def _update_baselines(self) -> None:
        self._changes = tuple(self.judging.update_baselines())

    def _attempt(self, what: str, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as refusal:
            self._unwritten = True
            self.bench.problems.append(
                f"{what} cannot be written: {refusal.strerror or refusal}; what was measured is kept in {self.folder}"
            )

    def exit_status(self, status: int) -> int:
        """pytest's, but never that of a good end for a run of which not everything is written."""
        return int(pytest.ExitCode.TESTS_FAILED) if self._unwritten and not status else status

    def close(self) -> None:
        """Take the stack down; safe to call at any time and more than once."""
        self.bench.close()

    def summary(self) -> RunSummary:
        """Everything for the final tables, read from disk so that xdist workers' cells are in it."""
        outcomes, problems = self._load()
        return RunSummary(
            run_id=self.run_id,
            engine=", ".join(sorted({engine.name for engine in self.inputs.engines.values()})),
            simulated=self.inputs.simulated,
            folder=self.folder,
            outcomes=tuple(outcomes),
            launches=tuple(self.bench.launch_lines),
            changes=self._changes,
            problems=(*problems, *self.bench.problems),
        )

    def _keep(self, outcome: CellOutcome) -> None:
        self._outcomes[(outcome.topology, outcome.result.cell, outcome.launch)] = outcome
        name, page = file_of(outcome)
        self.files.put(self.folder / CELLS / name, page)
        self.tell.judged(outcome.nodeid, outcome.verdict, cause_lines(outcome.naming, mark=""))

    def _load(self) -> tuple[list[CellOutcome], list[str]]:
        return load(self.folder / CELLS, self.files.waiting)


def open_session(config: pytest.Config, settings: Settings) -> Session:
    """Read and check all input. Raises UsageProblem."""
    workerinput: Mapping[str, Any] = getattr(config, "workerinput", {})
    now = datetime.now(UTC)
    run_id = str(
        workerinput.get("pdperf_run_id")
        or settings["resume"]
        or f"{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}"
    )
    root = project_root(config.rootpath, config.inipath, config.invocation_params.dir)
    inputs = read_inputs(settings, root)
    folder = root / settings["pdperf_results"] / run_id
    if settings["resume"] and not (folder / CELLS).is_dir():
        others = (
            sorted(path.parent.name for path in folder.parent.glob(f"*/{CELLS}"))
            if folder.parent.is_dir()
            else []
        )
        hint = f"; the newest there is {others[-1]}" if others else ""
        raise UsageProblem(f"--resume {run_id}: no such run in {folder.parent}{hint}")
    if not settings["plan"] and not config.option.collectonly:
        make_folder(folder)
    files = RunFiles(folder, run_id)
    tell = Narrator(PytestScreen(config))
    possible, problems = possible_here(config, settings)
    worker = str(workerinput.get("workerid", ""))
    bench: Measuring[Serving]
    if inputs.deployment:
        bench = AttachedBench(possible, inputs, run_id, files, tell)
    else:
        site = site_for(possible, inputs, run_id, folder, tell, worker=bool(worker))
        bench = Bench(possible, inputs, run_id, files, tell, site, worker)
    bench.problems += problems
    judging = Judging(settings=settings, inputs=inputs, root=root, run_id=run_id)
    return Session(
        settings=settings,
        inputs=inputs,
        run_id=run_id,
        files=files,
        bench=bench,
        judging=judging,
        confirming=Confirming(settings, bench, judging, inputs.workload.name, tell, kept_in(files, inputs)),
        tell=tell,
        worker=worker,
        gathers=not worker and config.getoption("dist", "no") != "no",
    )
