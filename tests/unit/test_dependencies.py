"""What a user's environment gets with the plugin is what the plugin uses: one dependency more may be a pytest plugin,
with a word of its own in every run.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def imported(folder: Path) -> Iterator[str]:
    """Top-level names of all modules that are imported anywhere in a folder, also inside functions."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]


def canonical(distribution: str) -> str:
    """Name as registries compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_every_dependency_is_imported_somewhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {canonical(re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0]) for line in project["dependencies"]}
    distributions = packages_distributions()
    names = set(imported(ROOT / "pytest_pdperf"))
    used = {canonical(one) for name in names for one in distributions.get(name, ())}
    assert len(wanted) > 10
    assert not wanted - used
