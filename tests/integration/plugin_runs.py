"""Runs of pytest inside a test, in a user's repository as small as it can be."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping

import pytest

QWEN3_32B = {
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
"""The config.json of a model that is planned for and never loaded."""
TRIES = 4
SPARED = ("-p", "no:hypothesispytest", "-p", "no:asyncio")
"""Plugins of this repository's own tests: the import of one costs over a second of CPU, the other warns."""
STARVED = re.compile(
    "the client got too little CPU|requests in flight on average|clients were busy at once"
    "|behind schedule|client lag p99"
)


def with_fixtures(pytester: pytest.Pytester, texts: Mapping[str, str]) -> pytest.Pytester:
    """The repository with these files below `fixtures/`, which must be new."""
    for name, text in texts.items():
        path = pytester.path / "fixtures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:
            file.write(text)
    return pytester


def measured_run(pytester: pytest.Pytester, *arguments: str, timeout: float) -> pytest.RunResult:
    """Run pytest, again for as long as its client was starved: such a run stores nothing and its folder is removed.

    For tests that want a verdict: of a starved client the plugin rightly refuses to judge, and the test would have
    learned about the host.
    """
    results = pytester.path / "pdperf-results"
    for tries_left in reversed(range(TRIES)):
        before = set(results.iterdir()) if results.exists() else set()
        result = pytester.runpytest_subprocess(*SPARED, *arguments, timeout=timeout)
        if not tries_left or not STARVED.search(result.stdout.str()):
            break
        for folder in set(results.iterdir()) - before:
            shutil.rmtree(folder)
    return result
