"""Other tools' result files, held to public bug reports: every input of a kind, with the answer that it must get."""

from __future__ import annotations

import json
from pathlib import Path

from tests.field_cases import FieldCase, field_case
from tests.unit.report.test_exchange_import import one, value


@field_case("066")
def test_066_result_files_over_the_versions(case: FieldCase, tmp_path: Path) -> None:
    for name in ("v_2025_05", "v_2026"):
        path, data = tmp_path / name, case.given[name]
        data["request_rate"] = str(data["request_rate"]) if name == "v_2025_05" else data["request_rate"]
        path.write_text(json.dumps(data))
        found, expected = one(path), case.want[name]
        assert found.failed == expected["failed"]
        if "failed_source" in expected:
            assert found.failed_source == expected["failed_source"]
            assert value(found, "vllm:request_goodput") is expected["goodput"]
            p50s = [m for k, m in found.metrics.items() if k in ("ttft_ms_p50", "vllm:p50_ttft_ms")]
            assert [m.value for m in p50s] == [expected["p50_ttft_ms"]]
        if "itl_suspect" in expected:
            assert any(expected["itl_suspect"] in warning for warning in found.warnings)


@field_case("068")
def test_068_records_of_aiperf(case: FieldCase, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in case.given["records"]))
    found = one(path)
    assert (found.ok, found.cancelled, found.failed, found.warmup_rows) == tuple(
        case.want[key] for key in ("ok", "cancelled", "errors", "warmup_rows")
    )
    assert list(found.samples["ttft_ms"]) == case.want["ttft_ms"]
    assert list(found.samples["itl_ms"]) == case.want["gaps_ms"]
