"""A real Slurm with two nodes on this machine and fake GPUs, as long as a test module needs it."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_pdperf.engines.base import Command
from pytest_pdperf.stack.logs import tail
from pytest_pdperf.stack.ports import PortRegistry
from pytest_pdperf.stack.processes import ManagedProcess

INSTALL = "PDPERF_TEST_SLURM"
"""Set to `install` it lets the tests install Debian's packages, as root; CI does."""
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "salloc")
INSTALL_S = 240.0
UP_S = 60.0

_CONF = Path(__file__).with_name("slurm_conf")


@dataclass(frozen=True)
class Cluster:
    """Where the programs of Slurm find this cluster."""

    conf: Path

    def env(self) -> dict[str, str]:
        """This process's environment with the cluster in it, and outside of any job."""
        return {k: v for k, v in os.environ.items() if not k.startswith("SLURM")} | {
            "SLURM_CONF": str(self.conf)
        }

    def ask(self, *argv: str) -> str:
        """What a program of Slurm prints."""
        return subprocess.run(
            argv, env=self.env(), check=True, capture_output=True, text=True, timeout=60
        ).stdout

    def jobs(self) -> list[str]:
        """Jobs that are pending, run, or end just now."""
        return self.ask("squeue", "--noheader", "-o", "%i %T %j").splitlines()


def lacking() -> str:
    """Why there can be no Slurm here; installs it when that is allowed. Empty when there can be one."""
    if os.geteuid() != 0:
        return "Slurm's daemons are started as root, and this is another user"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if not missing:
        return ""
    if os.environ.get(INSTALL) != "install" or shutil.which("apt-get") is None:
        return (
            f"no {', '.join(missing)} here; {INSTALL}=install lets root install them where there is apt-get"
        )
    said = _install()
    still = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"apt-get could not install {', '.join(still)}: {said}" if still else ""


def _install() -> str:
    """Install the packages; the last line that apt-get printed. Fresh package lists only when the old ones fail."""
    apt = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=60", "-o", "Acquire::Retries=1")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    said = ""
    until = time.monotonic() + INSTALL_S
    for words in (("install",), ("update",), ("install",)):
        packages = ("-y", "--no-install-recommends", *PACKAGES) if words == ("install",) else ()
        try:
            done = subprocess.run(
                (*apt, *words, *packages),
                env=env,
                capture_output=True,
                text=True,
                timeout=max(1.0, until - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"not done within {INSTALL_S:g} s"
        said = ((done.stderr or done.stdout).strip().splitlines() or [""])[-1]
        if words == ("install",) and done.returncode == 0:
            return ""
    return said


@contextmanager
def slurm_cluster(folder: Path) -> Generator[Cluster]:
    """Start munge, the controller and two nodes below `folder`, and end them again.

    All run in the foreground behind reapers, so that they end with this process however it ends.
    """
    registry = PortRegistry()
    ports = registry.reserve("slurm", 3)
    host = socket.gethostname().partition(".")[0]
    names = {"@DIR@": str(folder), "@HOST@": host}
    names |= {mark: str(ports.first + i) for i, mark in enumerate(("@PORT@", "@PORT1@", "@PORT2@"))}
    for template in _CONF.iterdir():
        text = template.read_text()
        for mark, value in names.items():
            text = text.replace(mark, value)
        (folder / template.name).write_text(text)
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    for number in range(4):
        os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(1024))
    cluster = Cluster(folder / "slurm.conf")
    conf = ("-f", str(cluster.conf))
    munged = (
        *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock"),
        *(f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munge.seed"),
        f"--log-file={folder}/munged.log",
    )
    daemons: list[ManagedProcess] = []

    def start(name: str, *argv: str) -> None:
        program = shutil.which(argv[0])
        assert program is not None
        log = folder / f"{name}.log"
        command = Command((program, *argv[1:]))
        daemons.append(ManagedProcess(name, command, log=log, run_id=f"slurm-{os.getpid()}"))

    try:
        start("munged-out", *munged)
        _wait(folder / "munge.sock", daemons)
        start("slurmctld", "slurmctld", "-D", *conf)
        start("slurmd-n1", "slurmd", "-D", "-N", "n1", *conf)
        start("slurmd-n2", "slurmd", "-D", "-N", "n2", *conf)
        _wait_idle(cluster, daemons)
        yield cluster
    finally:
        left = [line for daemon in reversed(daemons) for line in daemon.stop(5.0)]
        registry.close()
        assert not left, left


def _wait(path: Path, daemons: list[ManagedProcess]) -> None:
    until = time.monotonic() + UP_S
    while not path.exists():
        _check(daemons, until)
        time.sleep(0.05)


def _wait_idle(cluster: Cluster, daemons: list[ManagedProcess]) -> None:
    until = time.monotonic() + UP_S
    while True:
        answer = subprocess.run(
            ("sinfo", "--noheader", "--Node", "-o", "%T"),
            env=cluster.env(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if answer.stdout.split() == ["idle", "idle"]:
            return
        _check(daemons, until)
        time.sleep(0.1)


def _check(daemons: list[ManagedProcess], until: float) -> None:
    for daemon in daemons:
        end = daemon.poll()
        if end is not None or time.monotonic() > until:
            state = "not up in time" if end is None else end.describe()
            pytest.fail(f"{daemon.id}: {state}\n{tail(daemon.log)}", pytrace=False)
