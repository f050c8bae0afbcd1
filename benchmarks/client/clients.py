"""The clients under test, each run in a process of its own: `python -m benchmarks.client.clients NAME URL LOAD OUT`.

`pdperf` is this package's client. `httpx` and `aiohttp` are plain loops as one writes them for a benchmark: a task a
client, lines split as they come, a stamp for each, JSON left for later.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.client.load import MODEL, Load, Report
from benchmarks.client.waiting import since, waited_s


def hog(loop: asyncio.AbstractEventLoop, milliseconds: float) -> None:
    """Hold the loop `milliseconds` out of every two times that."""

    def hold() -> None:
        end = time.perf_counter() + milliseconds / 1e3
        while time.perf_counter() < end:
            pass
        loop.call_later(milliseconds / 1e3, hold)

    if milliseconds:
        loop.call_later(milliseconds / 1e3, hold)


def run_pdperf(url: str, load: Load) -> Report:
    """This package's client, driven as its worker drives it."""
    import uvloop

    from pytest_pdperf.load.decode import Expect, to_record
    from pytest_pdperf.load.drive import Drive
    from pytest_pdperf.load.job import Job
    from pytest_pdperf.load.planned import Planned, StreamPlan
    from pytest_pdperf.load.spool import Spool
    from pytest_pdperf.load.target import Target

    prompts = [load.body(i)["prompt"] for i in range(load.requests)]
    planned = tuple(Planned(tuple(p), load.tokens) for p in prompts)  # type: ignore[arg-type]
    plan = StreamPlan("s", planned, planned[:2], load.streams)
    job = Job(Target(url, MODEL), (plan,), 120.0, "bench")
    loop = uvloop.new_event_loop()
    with tempfile.TemporaryDirectory() as folder, Spool(Path(folder) / "bodies") as spool:
        drive = Drive(loop, job, spool)
        gc.collect()
        gc.freeze()
        gc.disable()
        hog(loop, load.hog_ms)
        before = waited_s()
        outcome = drive.run()
        waited = since(before)
        gc.enable()
        events = load.requests * load.tokens
        held = sum(
            sys.getsizeof(e.marks) + sys.getsizeof(e.body) + sys.getsizeof(e.headers)
            for e in outcome.exchanges
        )
        made = [
            to_record(e, spool.get(e), "completions", Expect()) for e in outcome.exchanges if not e.warmup
        ]
    bad = [r.error for r in made if r.status != "ok"]
    if bad:
        raise SystemExit(f"{len(bad)} requests failed: {bad[0]}")
    return Report(
        {r.request_id: [r.sent_ns, *r.event_ns] for r in made},
        outcome.cpu_s,
        [lag for r in made for lag in r.event_lag_ns],
        held / events,
        sum(e.merged for e in outcome.exchanges if not e.warmup),
        waited,
    )


class Loop:
    """What the two plain loops share: the queue of requests, and how a line becomes a stamp."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.rows: dict[str, list[int]] = {}
        self.bodies = [json.dumps(load.body(i)).encode() for i in range(load.requests)]
        self.next = 0

    def take(self) -> tuple[str, bytes] | None:
        """Id and body of the next request, None when all are sent."""
        if self.next >= len(self.bodies):
            return None
        self.next += 1
        return f"peer-{self.next}", self.bodies[self.next - 1]

    def line(self, row: list[int], line: bytes | str) -> None:
        """Stamp a line that carries a token."""
        text = line if isinstance(line, str) else line.decode()
        if text.startswith("data: ") and '"text":' in text:
            row.append(time.time_ns())


async def httpx_clients(url: str, loop: Loop) -> None:
    """`streams` tasks on one httpx client."""
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(limits=limits, timeout=120) as client:

        async def one() -> None:
            while (work := loop.take()) is not None:
                name, body = work
                row = loop.rows[name] = [time.time_ns()]
                sent = headers | {"X-Request-Id": name}
                async with client.stream(
                    "POST", f"{url}/v1/completions", content=body, headers=sent
                ) as answer:
                    async for line in answer.aiter_lines():
                        loop.line(row, line)

        await asyncio.gather(*(one() for _ in range(loop.load.streams)))


async def aiohttp_clients(url: str, loop: Loop) -> None:
    """`streams` tasks on one aiohttp session."""
    import aiohttp

    headers = {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=120)
    ) as session:

        async def one() -> None:
            while (work := loop.take()) is not None:
                name, body = work
                row = loop.rows[name] = [time.time_ns()]
                sent = headers | {"X-Request-Id": name}
                async with session.post(f"{url}/v1/completions", data=body, headers=sent) as answer:
                    async for line in answer.content:
                        loop.line(row, line)

        await asyncio.gather(*(one() for _ in range(loop.load.streams)))


def run_peer(url: str, load: Load, clients: Callable[[str, Loop], object]) -> Report:
    """One plain loop on the default event loop, as users run it."""
    work = Loop(load)

    async def main() -> None:
        hog(asyncio.get_running_loop(), load.hog_ms)
        await clients(url, work)  # type: ignore[misc]

    before, before_s = time.process_time(), waited_s()
    asyncio.run(main())
    return Report(work.rows, time.process_time() - before, [], waited_s=since(before_s))


CLIENTS: dict[str, Callable[[str, Load], Report]] = {
    "pdperf": run_pdperf,
    "aiohttp": lambda url, load: run_peer(url, load, aiohttp_clients),
    "httpx": lambda url, load: run_peer(url, load, httpx_clients),
}


def main(name: str, url: str, load: str, out: str) -> None:
    """Run one client and leave its report."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    CLIENTS[name](url, Load(**json.loads(load))).write(Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
