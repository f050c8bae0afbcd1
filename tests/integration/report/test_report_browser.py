"""The page in a real browser: no console message, pictures with a size, tooltips that answer, nothing injected."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_pdperf.measure.records import Status
from pytest_pdperf.report.html import write_html
from pytest_pdperf.report.outcomes import save
from pytest_pdperf.report.source import load_run
from tests.unit.report.report_data import cell_of, request, small_run, split, write_cell

BROWSER = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")

PROBE = """
<script>
addEventListener("load", function () {
  var facts = {}, number = document.querySelector(".pane-r td.n.worse1, .pane-r td.n.worse2, .pane-r td.n.worse3");
  if (number) {
    number.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: 5, clientY: 5}));
    facts.tip = document.getElementById("tip").textContent;
    facts.tipShown = getComputedStyle(document.getElementById("tip")).display;
  }
  document.getElementById("unfold").click();
  facts.charts = Array.from(document.querySelectorAll("svg.chart, svg.lanes")).map(function (svg) {
    return svg.getBoundingClientRect().height > 30;
  });
  document.getElementById("theme").click();
  facts.theme = document.documentElement.dataset.theme;
  facts.wide = document.documentElement.scrollWidth - innerWidth;
  facts.injected = typeof window.injected;
  var out = document.createElement("pre");
  out.id = "facts";
  out.textContent = JSON.stringify(facts);
  document.body.appendChild(out);
});
</script>
"""


def visit(page: Path, tmp_path: Path, width: int = 1280) -> tuple[dict[str, object], str]:
    """Open the page offline, run the probe in it; returns what it found and what the console said."""
    assert BROWSER is not None
    probed = tmp_path / "probed.html"
    probed.write_text(
        page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"), encoding="utf-8"
    )
    command = [
        *(BROWSER, "--headless=new", "--disable-gpu", "--no-first-run", "--enable-logging=stderr", "--v=0"),
        *(
            f"--window-size={width},900",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=4000",
        ),
        *("--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", probed.as_uri()),
    ]
    if os.geteuid() == 0:
        command.insert(1, "--no-sandbox")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r'<pre id="facts">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    facts: dict[str, object] = json.loads(
        found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
    )
    return facts, console


def test_a_run_opens_without_a_complaint(tmp_path: Path) -> None:
    page = write_html([load_run(small_run(tmp_path / "run"))], tmp_path / "report.html")
    facts, console = visit(page, tmp_path)
    assert console == ""
    charts = facts["charts"]
    assert isinstance(charts, list) and len(charts) == 3 * 2 + 6 + 4 and all(charts)
    assert "first token event" in str(facts["tip"]) and "n=8" in str(facts["tip"])
    assert facts["tipShown"] == "block"
    assert facts["theme"] in ("dark", "light")


def test_a_phone_scrolls_tables_and_not_the_page(tmp_path: Path) -> None:
    page = write_html([load_run(small_run(tmp_path / "run"))], tmp_path / "report.html")
    facts, _ = visit(page, tmp_path, width=500)
    assert isinstance(facts["wide"], int) and facts["wide"] <= 0


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    hostile = "</title></script></style><img src=x onerror='injected=1'><script>injected=1</script>"
    run = tmp_path / "run"
    bad = request(1, status=Status.RESET, gaps_ms=(), error=hostile)
    made = write_cell(run, "pd-1p2d", cell_of(), [request(0), bad], verdict="INVALID", rows=(hostile,))
    save(replace(made, ttft_split=split(9.0, prefill=4.0), evidence=hostile, engine=hostile), run / "cells")
    facts, console = visit(write_html([load_run(run)], tmp_path / "report.html"), tmp_path)
    assert console == "" and facts["injected"] == "undefined"
