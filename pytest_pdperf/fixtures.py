"""The public fixtures: small, chained and overridable, so that a project can swap any one of them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from .errors import BringUpError, CannotKeep
from .options import HOW_TO_RUN

if TYPE_CHECKING:
    from .evidence.cell_evidence import CellEvidence
    from .gpus.grammar import Device
    from .measure.cell_result import CellResult
    from .measure.mixed import Mixed
    from .measuring import Measured
    from .session import Session
    from .spec.topology import Topology
    from .spec.workload import Cell
    from .stack.running import Serving

SESSION: pytest.StashKey[Session] = pytest.StashKey()
"""Where a measuring run keeps its state; absent when the suite was not asked for."""


@contextmanager
def _in_plain_words() -> Iterator[None]:
    try:
        yield
    except (BringUpError, CannotKeep) as problem:
        raise pytest.fail.Exception(str(problem), pytrace=False) from None


class Measure:
    """Runs the item's cell on the item's stack; call it once or, for repeats, several times."""

    def __init__(self, session: Session, item: pytest.Item, topology: Topology, cell: Cell) -> None:
        self._session = session
        self._item = item
        self._topology = topology
        self._cell = cell

    def __call__(self, cell: Cell | None = None) -> CellResult:
        """Measure `cell` (default: the parametrised one). Raises RoleDied when a process of the stack ends."""
        with _in_plain_words():
            return self._session.measure(self._item.nodeid, self._topology, cell or self._cell)

    @property
    def evidence(self) -> CellEvidence:
        """What the servers say about the latest measurement: PD path, TTFT stages, transport, GPUs."""
        return self._latest.seen

    @property
    def mixed(self) -> Mixed | None:
        """How the streams of the latest measurement met; None for a cell with one stream."""
        return self._latest.mixed

    @property
    def _latest(self) -> Measured:
        if self._item.nodeid not in self._session.measured:
            raise LookupError("nothing is measured yet: call the `measure` fixture first")
        return self._session.measured[self._item.nodeid]


class Gate:
    """Holds a result against its stored baseline and fails the test item with the verdict rows."""

    def __init__(self, session: Session, item: pytest.Item, topology: Topology) -> None:
        self._session = session
        self._item = item
        self._topology = topology

    def check(self, result: CellResult) -> None:
        """Fail the item when a verdict blocks; the message holds one row for each metric that does."""
        problem = self._session.judge(self._item.nodeid, self._topology, result)
        if problem:
            pytest.fail(problem, pytrace=False)


@pytest.fixture(scope="session")
def pdperf(request: pytest.FixtureRequest) -> Session:
    """Everything that this run shares: settings, run id, results folder."""
    session = request.config.stash.get(SESSION, None)
    if session is None:
        pytest.skip(HOW_TO_RUN)
    return session


@pytest.fixture(scope="session")
def gpus(pdperf: Session) -> tuple[Device, ...]:
    """The devices given with `--gpus`, in that order; empty for the simulator."""
    return pdperf.devices


@pytest.fixture(scope="session")
def topology(request: pytest.FixtureRequest, pdperf: Session) -> Generator[Topology, None, None]:
    """The topology of this item. Taken down when the next one's turn comes."""
    launch = request.param
    pdperf.begin_launch(launch)
    yield launch.topology
    pdperf.take_down()


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> Cell:
    """The cell of this item."""
    cell: Cell = request.param
    return cell


@pytest.fixture
def stack(pdperf: Session, topology: Topology) -> Serving:
    """The topology, up and warm. Shared by its cells; brought up again after a role died."""
    with _in_plain_words():
        return pdperf.stack()


@pytest.fixture
def measure(
    pdperf: Session, request: pytest.FixtureRequest, topology: Topology, stack: Serving, cell: Cell
) -> Measure:
    """Callable that measures the cell and returns its result."""
    return Measure(pdperf, request.node, topology, cell)


@pytest.fixture
def gate(pdperf: Session, request: pytest.FixtureRequest, topology: Topology) -> Gate:
    """The baselines, ready to judge."""
    return Gate(pdperf, request.node, topology)
