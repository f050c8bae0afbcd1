"""Hides where the processes of a stack run, so that everything else is the same on one node and on many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pytest_pdperf.engines.base import Command
from pytest_pdperf.stack.processes import Exit, ManagedProcess

LOOPBACK = "127.0.0.1"


class RoleProcess(Protocol):
    """One engine or router that was started, wherever it runs."""

    id: str

    @property
    def log(self) -> Path:
        """Its stdout and stderr, on this machine."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that its log does not show."""

    @property
    def pid(self) -> int | None:
        """Pid on this machine: of the process itself, or of the program that stands for it here."""

    def poll(self) -> Exit | None:
        """How it ended, None while it runs. Never blocks."""

    def session(self) -> tuple[int, ...]:
        """Pids on this machine that belong to it."""

    def stopped(self) -> tuple[str, ...]:
        """One line for each of its processes that a signal or a debugger has stopped, as far as that can be seen."""

    def age_s(self) -> float:
        """Seconds since the start."""

    def kill(self) -> None:
        """SIGKILL it, as a crash would; `poll` then tells of it like of any other end."""

    def ask_to_stop(self, grace_s: float) -> None:
        """SIGTERM now, SIGKILL after `grace_s`. Returns at once; a later call can only shorten the grace."""

    def wait_stopped(self) -> tuple[str, ...]:
        """Wait for the end that `ask_to_stop` asked for; returns what could not be ended, normally nothing."""


class Launcher(Protocol):
    """How to start the roles of one stack. Made for a topology, whose instance ids it knows."""

    name: str

    def start(
        self,
        id: str,
        command: Command,
        *,
        log: Path,
        run_id: str,
        cpus: Sequence[int] = (),
        base: Mapping[str, str] | None = None,
    ) -> RoleProcess:
        """Start an instance or `router`; `base` is its environment (default: ours). Raises OSError if it cannot be."""

    def shown(self, id: str, command: Command) -> Command:
        """The command that `start` runs on this machine, for `--plan`."""

    def host(self, id: str) -> str:
        """Address under which the others and the client reach an instance or `router`; it listens there only."""

    def where(self, id: str, devices: Sequence[str]) -> str:
        """What an instance runs on, for people."""

    def taken(self, ports: Sequence[tuple[str, str, int]]) -> tuple[str, ...]:
        """One line for each (instance id, what for, port) that somebody holds where the instance will run."""

    def stage(self, line: str) -> str | None:
        """Name of the start-up stage that a line of the launcher itself opens, or None."""

    def cause(self, lines: Sequence[str]) -> str | None:
        """The launcher's own line about an end that it brought about or saw, or None."""


class LocalLauncher:
    """Child processes of this one, on this machine."""

    name = "local"

    def start(
        self,
        id: str,
        command: Command,
        *,
        log: Path,
        run_id: str,
        cpus: Sequence[int] = (),
        base: Mapping[str, str] | None = None,
    ) -> RoleProcess:
        """Start it behind a reaper (see `reaper`)."""
        return ManagedProcess(id, command, log=log, run_id=run_id, cpus=cpus, base=base)

    def shown(self, id: str, command: Command) -> Command:
        """The command itself."""
        return command

    def host(self, id: str) -> str:
        """Loopback: nobody else shall reach an engine without authentication."""
        return LOOPBACK

    def where(self, id: str, devices: Sequence[str]) -> str:
        """The devices."""
        return ",".join(devices) or "no device"

    def taken(self, ports: Sequence[tuple[str, str, int]]) -> tuple[str, ...]:
        """Nothing: the registry has tried each port on this machine."""
        return ()

    def stage(self, line: str) -> str | None:
        """None: a process starts at once."""
        return None

    def cause(self, lines: Sequence[str]) -> str | None:
        """None: what the kernel did is in the process's exit."""
        return None


LOCAL = LocalLauncher()
