"""A stack that is up: what it is made of, whether it still lives and answers, and how it ends."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol

import httpx

from pytest_pdperf.engines.base import Command
from pytest_pdperf.errors import BringUpError, RoleDied
from pytest_pdperf.stack import pairs
from pytest_pdperf.stack.greedy import client
from pytest_pdperf.stack.hangs import HangWatch
from pytest_pdperf.stack.launcher import RoleProcess
from pytest_pdperf.stack.logs import read_lines, tail
from pytest_pdperf.stack.plan import LaunchPlan
from pytest_pdperf.stack.secrets import mask

GRACE_S = 10.0
"""Between SIGTERM and SIGKILL on a normal end."""
FAILED_GRACE_S = 3.0
"""The same after a bring-up that failed."""
RESTART_LOOK_S = 2.0
"""Longest wait for one answer of an engine that comes up again."""


class Serving(Protocol):
    """A topology that is up, whoever brought it up: what tests and measurements may ask of it."""

    @property
    def url(self) -> str:
        """Base URL that clients talk to."""

    @property
    def model(self) -> str:
        """Model name for requests."""

    @property
    def role_urls(self) -> dict[str, str]:
        """Instance id -> base URL of its HTTP server, of those that are known."""

    def check(self) -> None:
        """Raise RoleDied when a part of it has ended or no longer answers."""


class Stack:
    """A topology that is up. Use as a context manager, or call `close`."""

    def __init__(self, plan: LaunchPlan, processes: Mapping[str, RoleProcess]) -> None:
        self.plan = plan
        self.processes = dict(processes)
        self.startup_s: dict[str, float] = {}
        """Stage (`engines`, `router`, `pairs`, `total`) -> seconds."""
        self.warmth = pairs.Warmth((), ())
        self.notes: tuple[str, ...] = ()
        """What is worth a line in the report, such as pairs that the router never forms."""
        self.leftovers: tuple[str, ...] = ()
        """After `close`: processes that could not be killed."""
        self.hangs: HangWatch | None = None
        """Who looks whether the processes still answer; from the end of the launch to `close`."""
        self._closed = False

    def watch_hangs(self, watch: HangWatch | None = None) -> None:
        """Begin to look once a second whether every process still answers; `check` tells when one does not."""
        router = self.plan.router_instance
        urls = self.role_urls | ({"router": router.url} if router is not None else {})
        self.hangs = watch or HangWatch(urls)
        self.hangs.start()

    @property
    def url(self) -> str:
        """Base URL that clients talk to."""
        return self.plan.url

    @property
    def model(self) -> str:
        """Model name for requests."""
        return self.plan.served_model

    @property
    def role_urls(self) -> dict[str, str]:
        """Instance id -> base URL of its HTTP server (health, metrics)."""
        return {i.id: i.url for i in self.plan.instances}

    @property
    def router_metrics_url(self) -> str | None:
        """URL of the router's Prometheus page; None without a router."""
        router = self.plan.router_instance
        return None if router is None else f"http://{router.host}:{router.metrics_port}/metrics"

    @property
    def logs(self) -> dict[str, Path]:
        """Instance id (and `router`) -> log file."""
        return {id: process.log for id, process in self.processes.items()}

    @property
    def pids(self) -> dict[str, int]:
        """Instance id (and `router`) -> pid, as far as known."""
        for process in self.processes.values():
            process.poll()
        return {id: p.pid for id, p in self.processes.items() if p.pid is not None}

    def check(self) -> None:
        """Raise RoleDied when any process of the stack has ended, or lives and no longer answers.

        An end is known within a second, a hang within `hangs.BOUND_S`.
        """
        for id, process in self.processes.items():
            end = process.poll()
            if end is not None:
                reason, detail = obituary(self.plan, process)
                raise RoleDied(id, reason, detail)
        silent = self.hangs.hangs() if self.hangs is not None else ()
        if silent:
            # A role that waits for a dead-silent one may be silent too; a stopped one is the cause.
            stopped = {hang.instance: self.processes[hang.instance].stopped() for hang in silent}
            worst = next((hang for hang in silent if stopped[hang.instance]), silent[0])
            why = "".join(f"; {line}" for line in stopped[worst.instance])
            others = ", ".join(hang.instance for hang in silent if hang is not worst)
            also = f"; silent as well: {others}" if others else ""
            text = f"stopped answering for {worst.silent_s:.0f} s ({worst.what}){why}{also}"
            raise RoleDied(worst.instance, text, tail(self.processes[worst.instance].log))

    def restart(
        self,
        id: str,
        *,
        deadline_s: float,
        command: Command | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> float:
        """Start an engine again on its own ports, dead or not; seconds until it serves the model.

        The rest of the stack goes on. `command` replaces the one that it was started with. Raises BringUpError when
        it dies again or is not up at `deadline_s`.
        """
        began = clock()
        old = self.processes[id]
        old.ask_to_stop(0.0)
        old.wait_stopped()
        number = len(list(self.plan.log_dir.glob(f"{id}-again-*.log"))) + 1
        log = self.plan.log_dir / f"{id}-again-{number}.log"
        cpus = self.plan.cpus.get(id, ())
        process = self.plan.launcher.start(
            id, command or self.plan.commands[id], log=log, run_id=self.plan.run_id, cpus=cpus
        )
        self.processes[id] = process
        url = self.role_urls[id]
        with client(RESTART_LOOK_S) as http:
            while not serves(http, url, self.model):
                if process.poll() is not None:
                    reason, detail = obituary(self.plan, process)
                    raise BringUpError(f"{id}, started again, ended: {reason}", detail)
                if clock() - began > deadline_s:
                    raise BringUpError(
                        f"{id}, started again, does not serve after {deadline_s:g} s", tail(log)
                    )
                sleep(0.1)
        return clock() - began

    def close(self, grace_s: float = GRACE_S) -> tuple[str, ...]:
        """End every process, the router first; idempotent. Returns (and keeps) what could not be killed.

        A Ctrl-C meanwhile cuts the grace short and is raised again when everything has ended.
        """
        if self._closed:
            return self.leftovers
        interrupted: BaseException | None = None
        if self.hangs is not None:
            self.hangs.stop()
        router = self.processes.get("router")
        order = ([router] if router else []) + [p for p in self.processes.values() if p is not router]
        for process in order:
            process.ask_to_stop(grace_s)
        while True:
            try:
                left = [line for process in order for line in process.wait_stopped()]
                break
            except BaseException as error:
                interrupted = error
                for process in order:
                    process.ask_to_stop(0.0)
        if self.hangs is not None:
            self.hangs.join()
        self.leftovers = tuple(left)
        self._closed = True
        self.plan.release()
        if interrupted is not None:
            raise interrupted
        return self.leftovers

    def __enter__(self) -> Stack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(GRACE_S if kind is None else FAILED_GRACE_S)


def serves(http: httpx.Client, url: str, model: str) -> bool:
    """Whether an engine is healthy and lists the model."""
    try:
        if http.get(url + "/health").status_code != 200:
            return False
        return any(m.get("id") == model for m in http.get(url + "/v1/models").json().get("data", ()))
    except (httpx.HTTPError, ValueError, AttributeError, TypeError):
        return False


def obituary(plan: LaunchPlan, process: RoleProcess) -> tuple[str, str]:
    """(one line, log tail) about a process that has ended."""
    end = process.poll()
    how = end.describe() if end is not None else "still running"
    cause = blame(plan, process)
    if cause is None and end is not None and end.code == 0:
        cause = "it ended by itself, without an error: does its command serve when it is run by hand?"
    return (f"{how}: {cause}" if cause else how), tail(process.log)


def blame(plan: LaunchPlan, process: RoleProcess) -> str | None:
    """The log line that explains a death, masked; None when nothing stands out."""
    lines = read_lines(process.log)
    cause = plan.launcher.cause(lines)
    if cause is not None:
        pass
    elif process.id == "router":
        bad = [line for line in lines if re.search(r"panicked at|\berror\b|Error\b", line, re.IGNORECASE)]
        cause = bad[-1] if bad else None
    else:
        cause = plan.engine.root_cause(lines)
    return mask(cause.strip()[:500], process.secrets) if cause else None
