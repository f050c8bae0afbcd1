"""A wheel, installed without its source tree, brings the suite along: what is not in it, a user does not have."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_everything_that_ships(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, copy in {
        "fixtures": "_fixtures",
        "tests/perf": "_perf",
        "baselines/published": "_published",
        "docs/examples": "_examples",
    }.items():
        sources = [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"]
        assert sources, f"{folder} is empty"
        missing = [p for p in sources if f"pytest_pdperf/{copy}/{p.relative_to(ROOT / folder)}" not in names]
        assert not missing
    assert "pytest_pdperf/py.typed" in names
    assert "pytest_pdperf/report/templates/report.html.j2" in names


def test_the_unpacked_wheel_finds_its_fixtures(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "from pytest_pdperf.spec.loader import find_topologies, find_workload, shipped_fixtures as s;"
        "print(s().name, find_topologies(['pd-1p2d'], [s()])[0].gpus, len(find_workload('quick', [s()]).cells))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.split()[:2] == ["_fixtures", "3"]
