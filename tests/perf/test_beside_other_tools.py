"""Our numbers beside the engine's own benchmark program on the same stack, minute by minute: `-m beside`."""

import pytest

from pytest_pdperf.beside import agreement, find, load_of, run
from pytest_pdperf.fixtures import Measure
from pytest_pdperf.session import Session
from pytest_pdperf.spec.topology import Topology
from pytest_pdperf.spec.workload import Cell
from pytest_pdperf.stack.running import Serving


@pytest.mark.pdperf_cells("beside")
def test_beside_other_tools(
    measure: Measure, pdperf: Session, stack: Serving, topology: Topology, cell: Cell
) -> None:
    """Metrics of the same definition agree within 3 %, unless client and engines share cores.

    Where they do not, the cell is measured once more: what lies between our own two values is no disagreement.
    """
    found = find(pdperf.inputs.engines[topology.name].name, pdperf.inputs.programs)
    if isinstance(found, str):
        pytest.skip(found)
    tool, program = found
    ours = pdperf.outcome_of(topology, cell)
    if ours is None:
        measure()
        ours = pdperf.outcome_of(topology, cell)
    assert ours is not None
    assert ours.result.invalid == (), "\n".join(ours.result.invalid)
    folder = pdperf.folder / "beside" / f"{topology.name}-{cell.id}"
    load = load_of(
        cell,
        url=stack.url,
        served_model=stack.model,
        tokenizer=pdperf.inputs.model,
        seed=pdperf.settings["workload_seed"],
        folder=folder,
    )
    theirs = run(tool, program, load, timeout_s=60 + 3 * (ours.result.wall_s or 60))
    lines, apart = agreement(theirs, ours)
    if apart and not pdperf.bench.shared_cores():
        again = measure()
        assert again.invalid == (), "\n".join(again.invalid)
        after = pdperf.outcome_of(topology, cell)
        assert after is not None
        lines, apart = agreement(theirs, ours, after)
    text = [f"{topology.name} {cell.id}, {tool.name}:", *(f"  {line}" for line in lines)]
    folder.with_suffix(".txt").write_text("\n".join(text) + "\n")
    assert theirs.ok == theirs.requests, f"{tool.name}: {theirs.failed} of {theirs.requests} requests failed"
    assert lines, f"{tool.name} and this suite have no metric of the same definition"
    if pdperf.bench.shared_cores():
        pytest.skip("client and engines share cores: shown, not held to 3 %")
    assert not apart, "\n".join(apart)
