"""What is recorded of an installation: the connector's library and the engine's commit, or nothing at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_pdperf.provenance import _of_installed
from pytest_pdperf.spec.topology import KvTransfer


@pytest.fixture
def program(tmp_path: Path) -> Path:
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    for name in (
        *("vllm-0.26.1.dev3+gabcdef1", "nixl-1.5.1", "nixl_cu12-1.5.1"),
        "mooncake_transfer_engine_non_cuda-0.3.13",
    ):
        (site / f"{name}.dist-info").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin" / "vllm"


@pytest.mark.parametrize(
    ("connector", "library"),
    [("nixl", "nixl-cu12 1.5.1"), ("mooncake", "mooncake-transfer-engine-non-cuda 0.3.13")],
)
def test_the_connectors_library_is_named_with_its_version(
    program: Path, connector: str, library: str
) -> None:
    kv = KvTransfer.model_validate({"connector": connector})
    assert _of_installed(program, "vllm", kv) == {"engine commit": "abcdef1", "connector": library}


def test_nothing_is_said_of_what_is_not_there(program: Path) -> None:
    example = KvTransfer.model_validate({"connector": "example"})
    assert _of_installed(program, "vllm", example) == {"engine commit": "abcdef1"}
    assert _of_installed(program, "vllm", None) == {"engine commit": "abcdef1"}
    assert _of_installed(None, "sim", KvTransfer.model_validate({"connector": "nixl"})) == {}
