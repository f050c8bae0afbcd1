"""The soak's own folder: gone at the end, and those of soaks that were killed with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lifecycle.scratch import scratch

DEAD = 4194999
"""Beyond the largest pid that Linux gives."""

SCRIPT = """
import sys, time
from pathlib import Path
from benchmarks.lifecycle.scratch import end_on_sigterm, scratch
end_on_sigterm()
with scratch(Path(sys.argv[1])) as folder:
    (folder / "log").write_text("x")
    print(folder.name, flush=True)
    time.sleep(600)
"""


def test_it_is_empty_and_goes_even_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), scratch(tmp_path) as folder:
        assert list(folder.iterdir()) == []
        (folder / "log").write_text("x")
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_only_what_dead_soaks_left_is_removed(tmp_path: Path) -> None:
    stay = [f"pdperf-soak-{os.getpid()}-abc", "pdperf-soak-abc", "another"]
    for name in [*stay, f"pdperf-soak-{DEAD}-abc"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "log").write_text("x")
    with scratch(tmp_path):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stay)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=["terminated", "killed"])
def test_a_soak_that_is_ended_from_outside_leaves_no_folder(tmp_path: Path, signum: signal.Signals) -> None:
    root = Path(__file__).parents[2]
    argv = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    with subprocess.Popen(argv, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert (tmp_path / name / "log").exists()
        process.send_signal(signum)
        process.wait(60)
    assert (tmp_path / name).exists() is (signum is signal.SIGKILL)
    with scratch(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
