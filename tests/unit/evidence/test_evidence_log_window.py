"""Only what was logged during the cell counts for it."""

from __future__ import annotations

from pathlib import Path

from pytest_pdperf.evidence.kv_logs import judge_kv_logs
from pytest_pdperf.evidence.log_window import LogWindow
from pytest_pdperf.spec.topology import Role

LINE = (
    "2026-11-29T16:17:55.123456Z (APIServer pid=1) INFO 11-29 16:17:55 [metrics.py:103] KV Transfer metrics: "
    "Num successful transfers={n}, Avg xfer time (ms)=5.0, Avg MB per transfer=2.0, Num failed transfers={bad}, "
    "Num KV expired reqs=0\n"
)


def test_lines_before_the_window_are_not_in_it(tmp_path: Path) -> None:
    log, empty, none = tmp_path / "decode-0.log", tmp_path / "prefill-0.log", tmp_path / "gone.log"
    log.write_text(LINE.format(n=7, bad=5))
    empty.write_text("")
    window = LogWindow({"decode-0": log, "prefill-0": empty, "gone": none})
    with log.open("a") as file:
        file.write(LINE.format(n=3, bad=0))
        file.write("half a line")
    found = window.lines()
    assert found["prefill-0"] == []
    assert found["gone"] is None
    rows = found["decode-0"]
    assert rows is not None
    assert len(rows) == 1
    roles = {"decode-0": Role.DECODE, "prefill-0": Role.PREFILL}
    verdict = judge_kv_logs({name: found[name] for name in roles}, roles)
    assert (verdict.status, verdict.totals.successful) == ("pass", 3)
    assert window.lines()["decode-0"] == []


def test_a_log_that_appears_later_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "late.log"
    window = LogWindow({"late": path})
    path.write_text("first\nsecond\n")
    assert window.lines() == {"late": ["first", "second"]}
