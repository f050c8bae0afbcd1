"""What the plugin costs a pytest run that has nothing to do with it: importing it, beside pytest itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

IMPORT = """
import time, pytest, _pytest.terminal
began = time.process_time()
import pytest_pdperf.plugin
print(time.process_time() - began)
"""
PROMISED_S = 0.050


@pytest.mark.benchmark(group="start", min_rounds=5)
def test_import_of_the_plugin(benchmark: BenchmarkFixture) -> None:
    """The round is a whole Python process; `import_ms` is the fastest import in it, in CPU time."""
    taken: list[float] = []

    def start() -> None:
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        taken.append(float(done.stdout))

    benchmark(start)
    benchmark.extra_info["import_ms"] = round(min(taken) * 1000, 2)
    assert min(taken) < PROMISED_S
