"""Finds a deployment among the pods of a namespace, reaches it through port-forwards, and watches its pods.

Everything asynchronous lives on one thread with one event loop; the rest of the suite sees plain calls.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.options import Settings
from pytest_pdperf.stack.secrets import mask

from .forwards import listen, port_of
from .named import ROUTER
from .pods import Json, Pod, assignments, hardware_of, nothing_matches, pods_of, refuse_shared, what_happened

CALL_S = 20.0
"""Longest wait for one answer of the API."""
POLL_S = 2.0
"""Between two looks at the pods."""
CLOSE_S = 5.0
PRODUCT_LABELS = ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "amd.com/gpu.product")
LOG_LINES = 20_000
"""Of a log from before we came: what an engine said at its start names the transport."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user says about the cluster."""

    namespace: str
    selectors: Mapping[str, str]
    """Role -> label selector."""
    ports: Mapping[str, int]
    context: str | None = None


def read_wanted(settings: Settings) -> Wanted:
    """The `--k8s...` options. Raises UsageProblem."""
    selectors = assignments(settings["k8s_selector"], "--k8s-selector")
    if not set(selectors) - {ROUTER}:
        raise UsageProblem(
            "--k8s: which pods? Give --k8s-selector prefill=LABELS and decode=LABELS, or server=LABELS"
        )
    ports = {}
    for role, text in assignments(settings["k8s_port"], "--k8s-port").items():
        if role not in selectors:
            raise UsageProblem(f"--k8s-port {role}={text}: there is no --k8s-selector {role}=LABELS")
        if not text.isdigit() or not 0 < int(text) < 65536:
            raise UsageProblem(f"--k8s-port {role}={text}: want a port number")
        ports[role] = int(text)
    return Wanted(settings["k8s"], selectors, ports, settings["k8s_context"])


class Cluster:
    """A namespace that is looked into. `close` ends every port-forward, log stream and thread."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.pods: tuple[Pod, ...] = ()
        self.urls: dict[str, str] = {}
        """Instance id -> address of the port-forward on this machine."""
        self.hardware = ""
        self.products: dict[str, str] = {}
        self.problems: list[str] = []
        self._kr8s = _library()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kubernetes", daemon=True)
        self._thread.start()
        self._api: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[asyncio.Server] = []
        self._happened: dict[str, str] = {}

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float = CALL_S) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise UsageProblem(f"--k8s: no answer of the API within {timeout_s:g} s") from None
        except UsageProblem:
            raise
        except Exception as problem:
            text = mask(f"{type(problem).__name__}: {problem}")[:300]
            raise UsageProblem(
                f"--k8s {self.wanted.namespace}: {text} (needed: get and list pods, pods/log, pods/portforward)"
            ) from None
        finally:
            future.cancel()  # whoever is interrupted here leaves nothing behind that goes on

    # -- finding -------------------------------------------------------------------------------------------

    def open(self, forward_router: bool = True) -> None:
        """Find the pods and open a port-forward to each. Raises UsageProblem for selectors that match nothing."""
        self._drop()
        self._call(self._connect())
        found: list[Pod] = []
        for role, selector in self.wanted.selectors.items():
            pods = pods_of(role, self._call(self._list(selector)), self.wanted.ports.get(role))
            if not pods:
                raise nothing_matches(role, selector, self.wanted.namespace, self._call(self._list(None)))
            found += pods
        refuse_shared(found)
        self.pods = tuple(found)
        self._happened = {}
        nodes = {pod.node for pod in found if pod.gpus and pod.node}
        self.products = {node: product for node in nodes if (product := self._call(self._product(node)))}
        self.hardware = hardware_of(found, self.products, self.wanted.namespace)
        for pod in found:
            if pod.role != ROUTER or forward_router:
                port = self._call(self._forward(pod))
                self.urls[pod.id] = f"http://127.0.0.1:{port}"
        self._call(self._start(self._poll()))

    async def _connect(self) -> None:
        if self._api is None:
            self._api = await self._kr8s.api(namespace=self.wanted.namespace, context=self.wanted.context)
            self._api.timeout = CALL_S

    async def _list(self, selector: str | None) -> list[Json]:
        found = self._api.get(
            self._kr8s.objects.Pod, namespace=self.wanted.namespace, label_selector=selector
        )
        return [pod.raw async for pod in found]

    async def _get(self, name: str) -> Any:
        """A pod as kr8s has it, None when it is gone."""
        found = self._api.get(self._kr8s.objects.Pod, name, namespace=self.wanted.namespace)
        return next(iter([pod async for pod in found]), None)

    async def _product(self, node: str) -> str:
        """What a node's labels call its GPUs; empty when they do not, or nodes may not be read."""
        with contextlib.suppress(Exception):
            async for found in self._api.get(self._kr8s.objects.Node, node):
                labels = found.raw["metadata"].get("labels") or {}
                return next((str(labels[key]) for key in PRODUCT_LABELS if key in labels), "")
        return ""

    # -- port-forwards -------------------------------------------------------------------------------------

    async def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.get_running_loop().create_task(work))

    async def _forward(self, pod: Pod) -> int:
        def failed(reason: str) -> None:
            self._tell(f"kubernetes: a port-forward to pod {pod.name} broke: {reason}")

        listener = await listen(self._api, self.wanted.namespace, pod.name, pod.port, failed)
        self._listeners.append(listener)
        return port_of(listener)

    def _tell(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    # -- watching ------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        misses = 0
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await asyncio.wait_for(self._look(), CALL_S)
                misses = 0
            except Exception as problem:
                misses += 1
                if misses == 3:
                    self._tell(
                        f"kubernetes: pods cannot be looked at, restarts are not known: {type(problem).__name__}"
                    )

    async def _look(self) -> None:
        seen: dict[str, Json] = {}
        for selector in dict.fromkeys(self.wanted.selectors.values()):
            seen |= {str(item["metadata"]["name"]): item for item in await self._list(selector)}
        for pod in self.pods:
            now = seen.get(pod.name)
            if now is None and (found := await self._get(pod.name)) is not None:
                now = found.raw  # it lost the labels it was found by
            if text := what_happened(pod, now):
                self._happened.setdefault(pod.id, text)

    def happened(self) -> Mapping[str, str]:
        """Instance id -> what happened to its pod since `open`, as far as polls have seen. Never blocks."""
        return dict(self._happened)

    def look(self) -> tuple[str, ...]:
        """Look at every pod now and tell what has happened; a look that fails is told as well."""
        try:
            self._call(self._look())
        except UsageProblem as problem:
            return (f"pods could not be looked at after the cell, restarts are not known: {problem}",)
        return tuple(self._happened.values())

    # -- logs ----------------------------------------------------------------------------------------------

    def follow_logs(self, folder: Path) -> dict[str, Path]:
        """Stream every pod's log into `folder/ID.log`, from its newest lines on; instance id -> file."""
        folder.mkdir(parents=True, exist_ok=True)
        files = {pod.id: folder / f"{pod.id}.log" for pod in self.pods}
        for pod in self.pods:
            self._call(self._start(self._log(pod, files[pod.id])))
        return files

    async def _log(self, pod: Pod, path: Path) -> None:
        why = "it ended"
        try:
            with path.open("a", encoding="utf-8") as out:
                target = await self._get(pod.name)
                if target is None:
                    return
                lines = target.logs(container=pod.container, follow=True, tail_lines=LOG_LINES, timeout=None)
                async for line in lines:
                    out.write(mask(line.rstrip("\n")) + "\n")
                    out.flush()
        except Exception as problem:
            why = mask(f"{type(problem).__name__}: {problem}")[:200]
        self._tell(f"kubernetes: no more log of pod {pod.name}: {why}")

    # -- the end -------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        """End forwards with their connections, polls and log streams; the connection to the API stays."""
        self.urls = {}

        async def end() -> None:
            while self._listeners:
                self._listeners.pop().close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=CLOSE_S)
            self._tasks.clear()

        if self._loop.is_running():
            with contextlib.suppress(UsageProblem):
                self._call(end(), 2 * CLOSE_S)

    def close(self) -> None:
        """End everything that was opened; safe to call more than once, and again after it was interrupted."""
        if self._loop.is_closed():
            return
        self._drop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


def _library() -> Any:
    try:
        import_module("kr8s.asyncio.objects")
        library = import_module("kr8s.asyncio")
    except ImportError as problem:
        raise UsageProblem(
            f"--k8s needs the library kr8s ({problem}): pip install 'pytest-pdperf[k8s]'"
        ) from None

    @dataclass(frozen=True)
    class Kr8s:
        api: Callable[..., Any] = library.api
        objects: Any = library.objects

    return Kr8s()
