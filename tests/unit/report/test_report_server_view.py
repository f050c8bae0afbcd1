"""The server side of a cell: known facts are shown, holes stay holes, and other versions' data breaks nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.evidence.naming import Fault, Finding, Naming
from pytest_pdperf.report.html import write_html
from pytest_pdperf.report.outcomes import save
from pytest_pdperf.report.server_view import LOOKS, server_rows
from pytest_pdperf.report.source import load_run
from tests.unit.report.report_data import outcome

DETAILS: dict[str, Any] = {
    "evidence": {
        "summary": "proven: 34 of 34",
        "transfers": 34.0,
        "transfer_bytes": 9.1e9,
        "bytes_per_request": 96.0 * 2**20,
        "transfer_rate": 11.7e9,
        "wall_rate": 3.58e9,
        "failed_transfers": 0.0,
        "failed_bootstraps": None,
        "retries": 2.0,
        "instances": [
            {"id": "prefill-0", "requests": 34.0, "computed_tokens": 34816.0, "transferred_tokens": 0.0},
            {"id": "decode-0", "requests": None, "computed_tokens": 0.0, "transferred_tokens": 17408.0},
        ],
    },
    "roles": {"prefill": {"served": 0.75, "waiting": 0.25}, "decode": {"served": None, "waiting": None}},
    "limiting": "transfer",
    "transport": {"used": "nvlink", "proof": "counters", "as_asked": False},
    "gpus": [{"sm_mhz": 1980.0, "power_w": 400.0, "temperature_c": 61, "throttled_share": 0.25}],
    "energy_per_output_token_j": 0.5,
    "mixed": {"stalled_share_beside": 0.4, "stalled_share_clear": 0.01, "beside": {"max_ms": 486.0}},
    "router_ms": None,
}
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*DETAILS, "instances", "id"]), inner)
    ),
    max_leaves=20,
)


def test_every_fact_is_told_with_its_unit() -> None:
    rows = {label: texts[0] for label, _, texts in server_rows([replace(outcome(), details=DETAILS)])}
    assert rows == {
        "evidence": "proven: 34 of 34",
        "requests": "prefill-0 34, decode-0 unknown",
        "prompt tokens computed": "prefill-0 34,816, decode-0 0",
        "prompt tokens transferred": "prefill-0 0, decode-0 17,408",
        "KV moved": "34 transfers, 9.1 GB, 96 MiB a request over all ranks",
        "KV rate": "11.7 GB/s a transfer of one rank, 3.58 GB/s over the window",
        "KV transport": "nvlink (by counters), not what was asked for",
        "failures": "0 failed transfers, 2 retries",
        "load": "prefill: 0.75 served, 0.25 waiting; decode: unknown",
        "waits longest for": "transfer",
        "steady beside burst": "stalled 40.0% of the time beside a long prefill, 1.0% without; longest gap 486 ms",
        "GPUs": "0: 1,980 MHz, 400 W, 61 °C, throttled 25% of the time",
        "energy": "0.5 J a token",
    }


def test_faults_come_first_and_a_healthy_cell_has_none() -> None:
    finding = Finding(Fault.SLOW_LINK, "decode-0", "98 MB/s against 1.2 GB/s in the baseline")
    cells = [
        replace(outcome(), naming=naming)
        for naming in (Naming((finding,)), Naming(), Naming(unknown=("speeds: no baseline",)), None)
    ]
    (row,) = server_rows(cells)
    assert row[0] == "faults"
    assert row[2] == (
        "KV transfer slowed (decode-0): 98 MB/s against 1.2 GB/s in the baseline",
        "none seen",
        "unknown: speeds: no baseline",
        "",
    )


def test_rows_that_nobody_knows_are_left_out_and_holes_stay_empty() -> None:
    known = replace(outcome(), details={"limiting": "prefill"})
    assert server_rows([outcome(), None]) == []
    assert server_rows([known, None, outcome()]) == [
        ("waits longest for", "what requests wait for longest before their first token", ("prefill", "", ""))
    ]


@given(st.dictionaries(st.sampled_from([*DETAILS, "new"]), plain))
def test_no_shape_of_data_is_an_error(details: dict[str, Any]) -> None:
    for label, _, texts in server_rows([replace(outcome(), details=details)]):
        assert label in {look.label for look in LOOKS} and all(isinstance(text, str) for text in texts)


@pytest.mark.parametrize("text", ["<img src=x onerror=alert(1)>"])
def test_the_page_shows_it_escaped(tmp_path: Path, text: str) -> None:
    save(replace(outcome(), details={**DETAILS, "limiting": text}), tmp_path / "run" / "cells")
    page = write_html([load_run(tmp_path / "run")], tmp_path / "x.html").read_text()
    assert "Server side" in page and "9.1 GB" in page
    assert "<img" not in page and "&lt;img src=x" in page
