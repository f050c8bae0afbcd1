"""What the page of a night costs who writes it and who opens it: memory of the process, and time in a real browser.

Both are printed and judged by the reader: they say as much about this machine as about the page.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pytest_pdperf.report.html import write_html
from pytest_pdperf.report.source import load_run

BROWSER = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
RENDER = """
import resource, sys
from pytest_pdperf.cli import main
status = main(["report", sys.argv[1], "--quiet", "--html", sys.argv[2]])
print(status, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
PROBE = """
<script>
addEventListener("load", function () {
  var height = document.documentElement.scrollHeight, loaded = performance.now(), shown = 0;
  document.getElementById("unfold").click();
  document.querySelectorAll("section.cellcard").forEach(function (card) { card.style.contentVisibility = "visible"; });
  document.querySelectorAll("svg").forEach(function (svg) { shown += svg.getBoundingClientRect().height > 30; });
  document.title = JSON.stringify({load_ms: loaded, unfold_ms: performance.now() - loaded, pictures: shown});
});
</script>
"""


@pytest.mark.benchmark(group="page", min_rounds=3)
def test_memory_of_the_process_that_writes_it(
    benchmark: BenchmarkFixture, night: Path, tmp_path: Path
) -> None:
    """`pdperf report RUN --html` in a process of its own; `peak_mib` is its largest resident set."""
    peaks: list[float] = []

    def report() -> None:
        command = [sys.executable, "-c", RENDER, str(night), str(tmp_path / "report.html")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        status, kib = done.stdout.split()[-2:]
        assert status == "0"
        peaks.append(int(kib) / 1024)

    benchmark(report)
    benchmark.extra_info["peak_mib"] = round(max(peaks))
    print(f"\npeak resident set: {max(peaks):.0f} MiB")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.benchmark(group="page", min_rounds=5)
def test_opening_it_in_a_browser(benchmark: BenchmarkFixture, night: Path, tmp_path: Path) -> None:
    """The round is a whole browser; `load_ms` runs to the end of load, `unfold_ms` lays out all of it."""
    page = write_html([load_run(night)], tmp_path / "report.html")
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"), encoding="utf-8")
    assert BROWSER is not None
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    command = [BROWSER, *root, "--headless=new", "--disable-gpu", "--no-first-run", "--window-size=1280,900"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]
    seen: list[dict[str, float]] = []

    def browse() -> None:
        done = subprocess.run(
            [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )
        title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
        assert title, done.stderr[-2000:]
        seen.append(json.loads(title[1]))

    benchmark(browse)
    assert all(one["pictures"] >= 32 for one in seen), "no picture for each of 32 cells"
    for name in ("load_ms", "unfold_ms"):
        times = sorted(one[name] for one in seen)
        benchmark.extra_info[name] = [round(time) for time in times]
        print(f"\n{name}: {', '.join(f'{time:.0f}' for time in times)}")
