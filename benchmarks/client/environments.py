"""Environments of the peers, one each, built once from closed lists of pins and kept in the cache.

A peer's needs must not touch another's or this package's: aiperf, guidellm and vLLM disagree about half of what they
share. `vllm bench serve` runs from the environment of `scripts/cpu_vllm`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.cpu_vllm.build import BuildError, Environment, cache_root, locked

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MAKE_MODEL = ROOT / "fixtures" / "tiny_model" / "make.py"
STAMP = "complete"

CHECKS: Mapping[str, str] = {
    "loops": "import httpx, aiohttp",
    "sglang": "import sglang.bench_serving",
    "aiperf": "import aiperf.cli",
    "guidellm": "import guidellm.__main__",
}
"""Environment -> what must import there; `vllm` is checked by its own build."""

_TOKENIZER = (
    "import pathlib, runpy, sys; runpy.run_path(sys.argv[1])['save_tokenizer'](pathlib.Path(sys.argv[2]))"
)


@dataclass(frozen=True, slots=True)
class Built:
    """What there is to run, and why the rest is missing."""

    environments: Mapping[str, Path]
    missing: Mapping[str, str]
    """Name -> one line that says why."""


def build_all(names: Iterable[str], torch_index: str | None = None) -> Built:
    """Build what is not in the cache. One that cannot be built is reported, not raised."""
    found: dict[str, Path] = {}
    missing: dict[str, str] = {}
    for name in names:
        print(f"environment of {name} ...", file=sys.stderr, flush=True)
        try:
            found[name] = vllm(torch_index) if name == "vllm" else build(name, torch_index)
        except (BuildError, OSError) as problem:
            missing[name] = reason(str(problem))
    return Built(found, missing)


def build(name: str, torch_index: str | None = None) -> Path:
    """Folder of a peer's environment. Raises BuildError."""
    pins = HERE / "requirements" / f"{name}.txt"
    key = f"{sys.implementation.cache_tag} {platform.python_version()} {platform.machine()}"
    digest = hashlib.sha256(key.encode() + pins.read_bytes()).hexdigest()[:12]
    env = Environment(cache_root(dict(os.environ)) / f"peer-{name}-{digest}")
    with locked(env.path.with_name(env.path.name + ".lock")):
        if not env.has(STAMP):
            shutil.rmtree(env.path, ignore_errors=True)
            env.path.mkdir(parents=True)
            env.call(sys.executable, "-I", "-m", "venv", env.path)
            if torch_index is not None:
                torch = [line for line in pins.read_text().splitlines() if line.startswith("torch==")]
                if torch:
                    env.pip_install("--index-url", torch_index, *torch)
            env.pip_install("-r", pins)
            env.call(env.python, "-I", "-c", CHECKS[name])
            env.finish(STAMP)
    return env.path


def vllm(torch_index: str | None = None) -> Path:
    """Folder of the environment with vLLM. Raises BuildError."""
    where = ["--torch-index", torch_index] if torch_index else []
    command = [sys.executable, str(ROOT / "scripts" / "cpu_vllm" / "build.py"), *where]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(done.stderr.strip() or "scripts/cpu_vllm/build.py failed")
    return Path(done.stdout.strip().splitlines()[-1])


def tokenizer(environments: Iterable[Path]) -> Path:
    """Folder of a small tokenizer, made by the first environment that can. Raises BuildError when none can."""
    digest = hashlib.sha256(MAKE_MODEL.read_bytes()).hexdigest()[:12]
    folder = cache_root(dict(os.environ)) / f"peer-tokenizer-{digest}"
    if (folder / "tokenizer.json").is_file():
        return folder
    problem = "no environment with transformers"
    for path in environments:
        made = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [str(path / "bin" / "python"), "-I", "-c", _TOKENIZER, str(MAKE_MODEL), str(made)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode == 0:
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
            return folder
        problem = done.stdout
    raise BuildError(problem)


def version_of(python: Path, distribution: str) -> str:
    """Installed version of a distribution; empty when unknown."""
    ask = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    command = [str(python), "-I", "-c", ask, distribution]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def reason(text: str) -> str:
    """The line of a failure that says most: the last one that names an error, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no message"])[-1][:200]
