"""The short way into vllm-router is the real router's own, and gives way where it does not fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_pdperf.engines.base import Programs
from pytest_pdperf.routers.vllm_router import START, start_of

PROGRAM = Programs((Path(sys.executable).parent,)).find("vllm-router")

LAUNCHER = """
from vllm_router.mini_lb import MiniLoadBalancer
{more}

def main():
    print("balanced" if MiniLoadBalancer("args").ready else "not ready")
"""
BALANCER = """
print("balancer imported")

class MiniLoadBalancer:
    ready = True

    def __init__(self, *args):
        assert type(self).ready
"""


def run(*argv: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(path)} if path else {}
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env=env)


@pytest.mark.skipif(PROGRAM is None, reason="needs vllm-router (extra `routers`)")
def test_it_is_the_real_router_without_the_imports_of_its_debugging_balancer() -> None:
    start = start_of(PROGRAM)
    assert start == (start[0], START)
    short = run(start[0], "-X", "importtime", START, "--help")
    assert short.stdout == run(str(PROGRAM), "--help").stdout
    imported = {line.rpartition("|")[2].strip() for line in short.stderr.splitlines()}
    assert {"vllm_router_rs", "vllm_router.router", "vllm_router.router_args"} <= imported
    assert not {"fastapi", "aiohttp", "uvicorn"} & imported


@pytest.mark.parametrize("more", ["", "class Own(MiniLoadBalancer):\n    pass"], ids=["called", "subclassed"])
def test_the_debugging_balancer_is_imported_when_it_is_wanted(tmp_path: Path, more: str) -> None:
    package = tmp_path / "vllm_router"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "mini_lb.py").write_text(BALANCER)
    (package / "launch_router.py").write_text(LAUNCHER.format(more=more))
    done = run(sys.executable, START, path=tmp_path)
    assert (done.stdout, done.returncode) == ("balancer imported\nbalanced\n", 0), done.stderr


def test_what_is_not_the_wheels_script_is_started_as_it_is(tmp_path: Path) -> None:
    wrapper = tmp_path / "vllm-router"
    wrapper.write_text("#!/usr/bin/python3\nimport mine\n")
    assert start_of(wrapper) == (str(wrapper),)
    wrapper.write_text("#!/bin/sh\nexec python -c 'from vllm_router.launch_router import main; main()'\n")
    assert start_of(wrapper) == (str(wrapper),)
    wrapper.write_text("#!/usr/bin/python3\nfrom vllm_router.launch_router import main\nmain()\n")
    assert start_of(wrapper) == ("/usr/bin/python3", START)
