"""The study of named faults, and what it costs to look: a short run of either."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.evidence.scraping import cpu_ms, page
from benchmarks.faults.study import DIES, HEALTHY, KNOBS, STARTS, order, study, table
from pytest_pdperf.evidence.exposition import Snapshot, parse_exposition
from pytest_pdperf.evidence.readings import LOOKS

SHORT = ("link", "recompute", DIES, STARTS)


@pytest.mark.timeout(280)
def test_faults_of_live_engines_are_named_and_health_is_not_accused() -> None:
    said: list[str] = []
    runs = study(1, 2, knobs=[knob for knob in KNOBS if knob.name in SHORT], say=said.append)
    assert said == []
    assert sorted(run.knob for run in runs) == sorted([*SHORT, HEALTHY, HEALTHY])
    assert all(run.right for run in runs)
    assert len(table(runs)) == 2 + 5


def test_every_knob_of_the_simulator_is_in_the_study() -> None:
    from pytest_pdperf.engines.sim.faults import ROLES_OF_FAULT

    assert {knob.name for knob in KNOBS} == set(ROLES_OF_FAULT)
    wanted = order(2, 3, KNOBS, seed=1)
    assert len(wanted) == 2 * (len(KNOBS) - 1) + 3, "a death brings its slow start along"


def test_reading_a_page_costs_a_fraction_of_what_the_library_needs() -> None:
    body = page()
    text = body.decode()
    whole, look = parse_exposition(body), parse_exposition(body, only=LOOKS)
    assert isinstance(whole, Snapshot) and isinstance(look, Snapshot)
    assert set(look.series) == LOOKS & set(whole.series)
    library = cpu_ms(lambda: list(text_string_to_metric_families(text)), 3)
    assert cpu_ms(lambda: parse_exposition(body), 5) < library / 2
    assert cpu_ms(lambda: parse_exposition(body, only=LOOKS), 5) < library / 5
