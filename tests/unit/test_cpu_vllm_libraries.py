"""Mooncake's native libraries where they are missing: unpacked without root, loaded by the plug-in, or asked for."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "cpu_vllm"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def build() -> Any:
    return module(SCRIPTS / "build.py")


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, *, downloads: bool) -> None:
    """`apt-get` and `dpkg-deb` that write what the real ones would, or a package index that is not there."""
    folder.mkdir()
    fetch = 'shift 3; for p; do echo > "$p.deb"; done' if downloads else "exit 100"
    unpack = 'mkdir -p "$3/usr/lib"; n=$(basename "$2" 1.deb).so.1; echo "$n" > "$3/usr/lib/$n"'
    for name, text in {"apt-get": fetch, "dpkg-deb": unpack}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def environment(build: Any, folder: Path) -> Any:
    (folder / "lib").mkdir(parents=True)
    return build.Environment(folder)


def test_what_is_missing_comes_out_of_packages(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path / "bin", monkeypatch, downloads=True)
    env = environment(build, tmp_path / "env")
    build.add_libraries(env, ["libibverbs.so.1", "libnuma.so.1"])
    found = sorted(path.name for path in (tmp_path / "env" / build.LIBRARIES).iterdir())
    assert found == ["libibverbs.so.1", "libnuma.so.1"]


def test_without_a_package_index_it_says_what_to_install(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path / "bin", monkeypatch, downloads=False)
    with pytest.raises(build.BuildError, match="As root: apt-get install libibverbs1 libnuma1"):
        build.add_libraries(environment(build, tmp_path / "env"), ["libibverbs.so.1", "libnuma.so.1"])


def test_the_plug_in_loads_what_is_there_and_survives_what_is_broken(tmp_path: Path) -> None:
    plugin: Any = module(SCRIPTS / "idle_plugin" / "pdperf_vllm_idle.py")
    shared = next(
        (
            Path(line.split()[-1])
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "libm.so" in line
        ),
        None,
    )
    if shared is None:
        pytest.skip(f"{sys.executable} has no libm to copy")
    shutil.copy(shared, tmp_path / "libnuma.so.1")
    (tmp_path / "libnl-3.so.200").write_text("no library")
    plugin.load_libraries(tmp_path)
    assert str(tmp_path / "libnuma.so.1") in Path("/proc/self/maps").read_text()
    plugin.load_libraries(tmp_path / "nowhere")


def test_both_sides_know_the_same_libraries_and_the_same_place(build: Any) -> None:
    plugin: Any = module(SCRIPTS / "idle_plugin" / "pdperf_vllm_idle.py")
    assert tuple(build.MOONCAKE_LIBRARIES) == plugin.LOADING_ORDER
    assert Path(sys.prefix) / build.LIBRARIES == plugin.LIBRARIES
