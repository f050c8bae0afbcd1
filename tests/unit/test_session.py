"""Small decisions of the session that need no process."""

from pathlib import Path

import pytest

from pytest_pdperf.session import project_root

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
