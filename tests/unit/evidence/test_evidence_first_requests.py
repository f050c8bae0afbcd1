"""A stack that answers and does not disaggregate is told before its first cell."""

from __future__ import annotations

from pytest_pdperf.evidence.exposition import Snapshot, Unknown
from pytest_pdperf.evidence.first_requests import at_birth, doubt
from pytest_pdperf.spec.topology import Kind, Role
from tests.field_cases import FieldCase, field_case
from tests.unit.evidence.evidence_pages import IDLE, edited, snap, text_of

ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
BYPASSED = edited(
    "vllm_decode.prom",
    ('source="local_compute"} 0.0', 'source="local_compute"} 40960.0'),
    ('source="external_kv_transfer"} 40960.0', 'source="external_kv_transfer"} 0.0'),
    ('source="p2p"} 40960.0', 'source="p2p"} 0.0'),
)
HALF = edited(
    "vllm_decode.prom",
    ('source="local_compute"} 0.0', 'source="local_compute"} 20480.0'),
    ('source="external_kv_transfer"} 40960.0', 'source="external_kv_transfer"} 20480.0'),
    ('source="p2p"} 40960.0', 'source="p2p"} 20480.0'),
)


def said(decode: str, prefill: str, kind: Kind = Kind.PD) -> str | None:
    return doubt(kind, {"prefill-0": snap(prefill), "decode-0": snap(decode)}, ROLES)


def test_first_requests_that_decode_computed_itself() -> None:
    found = said(BYPASSED, IDLE)
    assert found is not None and "bypassed: 0 of 10" in found
    half = said(HALF, text_of("vllm_prefill.prom"))
    assert half is not None and "partial: 5 of 10" in half


def test_no_doubt_where_all_went_well_or_nothing_can_be_told() -> None:
    assert said(text_of("vllm_decode.prom"), text_of("vllm_prefill.prom")) is None
    assert said(IDLE, IDLE) is None, "nothing was served"
    assert said(BYPASSED, IDLE, Kind.AGGREGATED) is None
    assert doubt(Kind.PD, {"prefill-0": snap(IDLE), "decode-0": Unknown("silent")}, ROLES) is None
    assert doubt(Kind.PD, {}, ROLES) is None


def test_a_page_at_birth_has_counted_nothing_and_is_the_same_process() -> None:
    page = snap("process_start_time_seconds 5\nvllm:request_success_total 7\nvllm:cache_config_info 1\n")
    born = at_birth(page)
    assert isinstance(born, Snapshot)
    values = {name: rows[0].value for name, rows in born.series.items()}
    assert values == {
        "process_start_time_seconds": 5,
        "vllm:request_success_total": 0,
        "vllm:cache_config_info": 1,
    }


@field_case("045")
def test_045_an_answer_is_not_yet_a_transfer(case: FieldCase) -> None:
    """Where every worker is counted and no transfer is ever proven, nothing is ready and somebody is told."""
    proven = case.given["probe_ok_at"] is not None
    assert case.want["ready_at"] == case.given["probe_ok_at"]
    found = (
        said(text_of("vllm_decode.prom"), text_of("vllm_prefill.prom")) if proven else said(BYPASSED, IDLE)
    )
    assert (found is None) == (case.want["ready_at"] is not None)
