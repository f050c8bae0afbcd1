"""Small decisions of the session that need no process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_pdperf.options import resolve
from pytest_pdperf.project import project_root
from pytest_pdperf.session import open_session

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


@pytest.mark.parametrize(
    ("named", "given"),
    [("sim-sglang", {}), ("sim", {}), (None, {"engine": "sim"}), ("vllm", {"gpus": "cpu"})],
)
def test_a_run_is_simulated_whoever_names_the_engine(
    tmp_path: Path, named: str | None, given: dict[str, str]
) -> None:
    folder = tmp_path / "fixtures/topologies"
    folder.mkdir(parents=True)
    engine = f"engine: {named}\n" if named else ""
    (folder / "one.yaml").write_text(f"kind: aggregated\n{engine}roles: {{server: {{replicas: 1}}}}\n")
    values = {"pdperf_topology": "one", "pdperf_model": "m"}
    settings = resolve((values | {f"pdperf_{k}": v for k, v in given.items()}).get, lambda name: None)
    config: Any = SimpleNamespace(
        rootpath=tmp_path,
        inipath=None,
        invocation_params=SimpleNamespace(dir=tmp_path),
        option=SimpleNamespace(collectonly=True),
        getoption=lambda name, default: default,
        pluginmanager=SimpleNamespace(get_plugin=lambda name: None),
    )
    session = open_session(config, settings)
    simulated = named != "vllm"
    assert session.inputs.simulated is simulated
    assert session.summary().simulated is simulated
    assert ("(SIMULATED)" in session.header()[0]) is simulated
    stored: Any = SimpleNamespace(stored=None)
    session.judging.cells.append(stored)
    if simulated:
        assert session.judging.finish() == [], "and no history of a model's numbers is kept"
