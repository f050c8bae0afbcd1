"""Public bug reports as data: a small input each, and what a careful tool must make of it.

`tests/data/field_cases/<id>.yaml` holds this repository's own inputs of a kind of fault, with the reports they are
made after; where the shared collection lies beside the repository, its input of the same id is run as well. A test
names the id and is given every input of it, so no input is covered in spirit only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
OWN = ROOT / "tests" / "data" / "field_cases"
SHARED = ROOT.parent / "shared" / "cases"


@dataclass(frozen=True, slots=True)
class FieldCase:
    """One input of a kind of fault."""

    name: str
    given: Any
    want: Any
    about: Mapping[str, Any]
    """The whole entry: title, sources and what else the input's author wrote."""


def inputs_of(number: str) -> list[FieldCase]:
    """All inputs of an id: our own, then the collection's where it is there."""
    found = [_case(f"{number}-{entry['name']}", entry) for entry in _load(OWN / f"{number}.yaml")]
    return found + [_case(path.stem, _load(path)) for path in sorted(SHARED.glob(f"{number}-*.yaml"))]


def field_case(number: str) -> pytest.MarkDecorator:
    """Runs a test over all inputs of an id; it takes them one by one as `case`."""
    return pytest.mark.parametrize("case", inputs_of(number), ids=lambda case: case.name)


def _load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def _case(name: str, entry: Mapping[str, Any]) -> FieldCase:
    return FieldCase(name, entry["input"], entry["expected"], entry)
