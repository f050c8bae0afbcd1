"""Mixed load: a steady stream and bursts of long prompts at once, on every topology, from the same seed."""

import pytest

from pytest_pdperf.fixtures import Gate, Measure
from pytest_pdperf.measure.mixed import Mixed
from pytest_pdperf.spec.topology import Kind, Topology

STALLED_SHARE = 0.5
"""Part of its streaming time that a steady stream under PD may spend in stalls while long prompts are prefilled.

Above it the stream waits for prefills, as on an aggregated server (84 % with vLLM on two H200). What arriving KV costs
a decode engine stays below (19 % with vLLM over NIXL there, nothing with SGLang) and is held by the baselines.
"""


@pytest.mark.pdperf_cells("mixed")
def test_mixed_load(measure: Measure, gate: Gate, topology: Topology) -> None:
    """Every stream held against its baseline; under PD a burst must not stall the steady stream."""
    result = measure()
    mixed = measure.mixed
    problems = [] if result.invalid else stalls(mixed, topology.kind)
    gate.check(result)
    assert not problems, "\n".join(problems)


def stalls(mixed: Mixed | None, kind: Kind) -> list[str]:
    """What a burst did to the steady stream that it may not do; a cell without any long prefill shows nothing."""
    if mixed is None:
        return ["the streams of this cell cannot be told apart"]
    if not mixed.prefills or not mixed.beside.count or not mixed.clear.count:
        return [
            f"{mixed.prefills} long prefills, {mixed.beside.count} gaps of {mixed.stream} beside them and "
            f"{mixed.clear.count} without: the streams never met, or never parted"
        ]
    share = mixed.beside.stalled_share or 0.0
    if kind is Kind.PD and share > STALLED_SHARE:
        return [
            f"a burst stalls {mixed.stream}: {mixed.beside.stall_count} stalls, {mixed.beside.stall_ms:.0f} of "
            f"{mixed.beside.total_ms:.0f} ms beside long prefills ({share:.0%}, limit {STALLED_SHARE:.0%}); longest "
            f"gap {mixed.beside.max_ms or 0.0:.1f} ms, median without a prefill {mixed.clear.p50_ms or 0.0:.1f} ms"
        ]
    return []
