"""What lies beside a program says which commit it was built from, in whichever of three ways it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_pdperf.engines.installed import commit_of


def program(tmp_path: Path, version: str = "0.26.0", **files: str) -> Path:
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    info = site / f"vllm-{version}.dist-info"
    info.mkdir(parents=True)
    (site / "vllm").mkdir()
    if "direct_url" in files:
        (info / "direct_url.json").write_text(files["direct_url"])
    if "scm" in files:
        (site / "vllm" / "_version.py").write_text(files["scm"])
    (tmp_path / "bin").mkdir()
    found = tmp_path / "bin" / "vllm"
    found.write_text("#!/bin/sh\n")
    return found


def test_a_direct_install_names_its_commit(tmp_path: Path) -> None:
    text = '{"url": "https://x/vllm", "vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}}'
    assert commit_of(program(tmp_path, direct_url=text), "vllm") == "0123456789abcdef"


@pytest.mark.parametrize(
    ("version", "commit"),
    [("0.26.1.dev3+gabcdef1", "abcdef1"), ("0.26.1.dev3+cu130.gabcdef1", "abcdef1"), ("0.26.0+cpu", "")],
)
def test_a_version_may_hold_it(tmp_path: Path, version: str, commit: str) -> None:
    assert commit_of(program(tmp_path, version), "vllm") == commit


@pytest.mark.parametrize(
    ("scm", "commit"), [("commit_id = 'gabcdef12'", "abcdef12"), ("__commit_id__ = commit_id = None", "")]
)
def test_setuptools_scm_writes_it_into_a_module(tmp_path: Path, scm: str, commit: str) -> None:
    assert commit_of(program(tmp_path, scm=scm), "vllm") == commit


def test_no_program_and_no_package_say_nothing(tmp_path: Path) -> None:
    assert commit_of(None, "vllm") == ""
    assert commit_of(program(tmp_path), "sglang") == ""
