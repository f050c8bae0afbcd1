"""What several tests of the gate start from."""

from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where baselines go; nothing is there yet."""
    return tmp_path / "baselines"
