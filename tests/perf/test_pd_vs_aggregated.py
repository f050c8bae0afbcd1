"""PD against aggregated: what the suite claims about two topologies, held against what this run has measured.

It measures nothing itself and runs after the tests that do.
"""

import pytest

from pytest_pdperf.fixtures import SESSION
from pytest_pdperf.gate.paired import Expectation, Standing
from pytest_pdperf.options import HOW_TO_RUN
from pytest_pdperf.report.comparison import answers
from pytest_pdperf.session import Session

pytestmark = [pytest.mark.pd, pytest.mark.aggregated]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item a claim that this run's topologies and workload can answer."""
    session = metafunc.config.stash.get(SESSION, None)
    claims = session.claims() if session is not None else ()
    why = (
        HOW_TO_RUN
        if session is None
        else "fixtures/expectations.yaml says nothing about this run's topologies and workload"
    )
    parameters = [
        pytest.param(
            claim,
            id=f"{claim.candidate}-vs-{claim.reference}-{claim.metric}-{claim.cell}".replace("*", "any"),
        )
        for claim in claims
    ]
    metafunc.parametrize(
        "claim", parameters or [pytest.param(None, marks=pytest.mark.skip(reason=why), id="none")]
    )


def test_pd_vs_aggregated(pdperf: Session, claim: Expectation) -> None:
    """VIOLATED fails. What the launches cannot decide is skipped with its numbers: it is not a pass."""
    if pdperf.worker:
        pytest.skip("an xdist worker sees one topology only; run without -n to hold two against each other")
    found = answers(claim, pdperf.summary().outcomes)
    text = "\n".join(answer.line() for answer in found)
    if any(answer.standing is Standing.VIOLATED for answer in found):
        pytest.fail(text, pytrace=False)
    if any(answer.standing is Standing.UNDECIDED for answer in found):
        pytest.skip(text)
