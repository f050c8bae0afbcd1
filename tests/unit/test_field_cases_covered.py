"""No field case is covered in spirit only: a test of the suite names every id and is given its inputs."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
import yaml

from tests.field_cases import OWN, ROOT, SHARED, inputs_of
from tests.integration.load.stream_cases import own_cases, shared_cases

IDS: dict[str, list[str]] = yaml.safe_load((OWN / "ids.yaml").read_text())
KINDS = {number: kind for kind, numbers in IDS.items() for number in numbers}
MET_WITH_SIBLINGS = ("018", "029", "030", "032", "039", "044", "045", "046")
"""Kinds that no test had named, each with more inputs made after other public reports."""


def named_by_tests() -> Counter[str]:
    """How many tests are given the inputs of each id: functions named `test_<id>_...` with `field_case("<id>")`."""
    found: Counter[str] = Counter()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        if "field_case" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and getattr(mark.func, "id", "") == "field_case":
                    assert isinstance(mark.args[0], ast.Constant)
                    number = str(mark.args[0].value)
                    assert node.name.startswith(f"test_{number}_"), f"{path.name}: {node.name}"
                    assert "case" in {argument.arg for argument in node.args.args}
                    found[number] += 1
    return found


NAMED = named_by_tests()


@pytest.mark.parametrize("number", [n for n, kind in sorted(KINDS.items()) if kind != "stream"])
def test_every_id_is_run_by_a_test_with_an_input_of_our_own(number: str) -> None:
    assert NAMED[number], f"no test takes field_case({number!r})"
    own = yaml.safe_load((OWN / f"{number}.yaml").read_text())
    assert own and all(entry["source"][0].startswith("https://github.com/") for entry in own)
    assert len(inputs_of(number)) == len(own) + SHARED.is_dir()
    assert len(own) >= (2 if number in MET_WITH_SIBLINGS else 1)


def test_nothing_else_is_named_or_lies_there() -> None:
    others = {number for number, kind in KINDS.items() if kind != "stream"}
    assert set(NAMED) == others
    assert {path.stem for path in OWN.glob("*.yaml")} == others | {"ids"}


def test_streams_have_cases_of_their_own() -> None:
    assert len(own_cases()) >= len(IDS["stream"])


@pytest.mark.skipif(
    not SHARED.is_dir(), reason="the shared case collection does not lie beside this repository"
)
def test_the_list_is_the_collections() -> None:
    there = {
        path.name[:3]: yaml.safe_load(path.read_text())["kind"]
        for path in SHARED.glob("[0-9][0-9][0-9]-*.yaml")
    }
    assert there == KINDS
    assert {case.name[:3] for case in shared_cases(True)} == set(IDS["stream"])
