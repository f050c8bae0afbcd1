"""Inventories for every test of this room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_pdperf.gpus.inventory import Inventory, load_recorded

INVENTORIES = Path(__file__).parents[2] / "data" / "inventories"


@pytest.fixture
def inventory() -> Callable[[str], Inventory]:
    """Inventory by the name of its file."""
    return lambda name: load_recorded(INVENTORIES / f"{name}.json")
