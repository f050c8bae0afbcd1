"""Small decisions of the session that need no process."""

import errno
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.options import resolve
from pytest_pdperf.project import project_root
from pytest_pdperf.session import Session, open_session

PROJECT = Path("/home/me/project")


@pytest.mark.parametrize(
    ("rootpath", "ini", "invoked", "expected"),
    [
        (PROJECT, True, PROJECT, PROJECT),
        (PROJECT, True, PROJECT / "tests", PROJECT),
        (PROJECT, False, PROJECT / "tests", PROJECT / "tests"),
        (Path("/"), False, PROJECT, PROJECT),
        (Path("/opt/engines"), True, PROJECT, PROJECT),
    ],
)
def test_the_root_is_the_project_that_holds_the_current_folder(
    rootpath: Path, ini: bool, invoked: Path, expected: Path
) -> None:
    assert project_root(rootpath, rootpath / "pytest.ini" if ini else None, invoked) == expected


def opened(root: Path, engine: str, given: dict[str, str], *, collect_only: bool = True) -> Session:
    """A session on one topology of one server."""
    folder = root / "fixtures/topologies"
    folder.mkdir(parents=True)
    (folder / "one.yaml").write_text(f"kind: aggregated\n{engine}roles: {{server: {{replicas: 1}}}}\n")
    values = {"pdperf_topology": "one", "pdperf_model": "m"}
    settings = resolve((values | {f"pdperf_{k}": v for k, v in given.items()}).get, lambda name: None)
    config: Any = SimpleNamespace(
        rootpath=root,
        inipath=None,
        invocation_params=SimpleNamespace(dir=root),
        option=SimpleNamespace(collectonly=collect_only),
        getoption=lambda name, default: default,
        pluginmanager=SimpleNamespace(get_plugin=lambda name: None),
    )
    return open_session(config, settings)


@pytest.mark.parametrize(
    ("named", "given"),
    [("sim-sglang", {}), ("sim", {}), (None, {"engine": "sim"}), ("vllm", {"gpus": "cpu"})],
)
def test_a_run_is_simulated_whoever_names_the_engine(
    tmp_path: Path, named: str | None, given: dict[str, str]
) -> None:
    session = opened(tmp_path, f"engine: {named}\n" if named else "", given)
    simulated = named != "vllm"
    assert session.inputs.simulated is simulated
    assert session.summary().simulated is simulated
    assert ("(SIMULATED)" in session.header()[0]) is simulated
    stored: Any = SimpleNamespace(stored=None)
    session.judging.cells.append(stored)
    if simulated:
        session.judging.append_history()
        assert session.judging.update_baselines() == [], "and no history of a model's numbers is kept"


@pytest.mark.parametrize("refused", ["append_history", "update_baselines"])
def test_a_run_whose_end_the_disk_refuses_says_so_and_does_not_end_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    session = opened(tmp_path, "", {"engine": "sim"})
    done: list[str] = []

    def write(name: str) -> list[str]:
        if name == refused:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done.append(name)
        return done

    for name in ("append_history", "update_baselines"):
        monkeypatch.setattr(session.judging, name, partial(write, name))
    session.finish()
    (line,) = session.bench.problems
    assert line.startswith(refused.split("_")[1]) and "cannot be written: No space left on device" in line
    assert len(done) == 1, "the other is written all the same"
    assert [session.exit_status(status) for status in (0, 1, 2)] == [1, 1, 2]


def test_a_run_that_is_all_written_ends_as_pytest_says(tmp_path: Path) -> None:
    session = opened(tmp_path, "", {"engine": "sim"})
    session.finish()
    assert [session.exit_status(status) for status in (0, 1, 2)] == [0, 1, 2]


def test_a_run_to_resume_that_is_not_there_names_the_newest_that_is(tmp_path: Path) -> None:
    for run in ("20260101-000000-aaaa", "20260102-000000-bbbb"):
        (tmp_path / "pdperf-results" / run / "cells").mkdir(parents=True)
    with pytest.raises(UsageProblem, match="the newest there is 20260102-000000-bbbb"):
        opened(tmp_path, "", {"engine": "sim", "resume": "RUN"})


def test_a_disk_that_is_full_before_the_run_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        UsageProblem, match=r"--pdperf-results: .*No space left on device; give another folder"
    ):
        opened(tmp_path, "", {"engine": "sim"}, collect_only=False)
