"""Fetch the metrics pages of all engines at once, each from the engine itself, never through the router."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import httpx

from pytest_pdperf.stack.access import LOOPBACK, Access

from .exposition import MAX_PAGE_BYTES, Snapshot, Unknown, parse_exposition

Clock = Callable[[], float]


def metrics_url(base: str) -> str:
    """Where an engine with this base URL prints its metrics; a URL that already ends in /metrics is kept."""
    trimmed = base.rstrip("/")
    return trimmed if trimmed.endswith("/metrics") else f"{trimmed}/metrics"


def scrape(
    urls: Mapping[str, str],
    timeout_s: float = 5.0,
    *,
    clock: Clock = time.monotonic,
    max_bytes: int = MAX_PAGE_BYTES,
    access: Access = LOOPBACK,
) -> dict[str, Snapshot | Unknown]:
    """Read all pages concurrently: instance id -> snapshot, or the reason why there is none.

    `urls` maps instance ids to base URLs. `timeout_s` bounds each page as a whole, also one that drips byte
    by byte. `access` lets the suite in where a key is asked for. Never raises for what a server does.
    """
    if not urls:
        return {}
    with ThreadPoolExecutor(max_workers=min(32, len(urls)), thread_name_prefix="scrape") as pool:
        pages = {
            name: pool.submit(_page, metrics_url(base), timeout_s, clock, max_bytes, access)
            for name, base in urls.items()
        }
        return {name: page.result() for name, page in pages.items()}


def _page(url: str, timeout_s: float, clock: Clock, max_bytes: int, access: Access) -> Snapshot | Unknown:
    try:
        return _fetch(url, timeout_s, clock, max_bytes, access)
    except httpx.TimeoutException as problem:
        return Unknown(f"{url}: no complete page within {timeout_s:g} s ({type(problem).__name__})")
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as problem:
        return Unknown(f"{url}: {type(problem).__name__}: {problem}")


def _fetch(url: str, timeout_s: float, clock: Clock, max_bytes: int, access: Access) -> Snapshot | Unknown:
    deadline = clock() + timeout_s
    accept = {"Accept": "text/plain; version=0.0.4", "Accept-Encoding": "identity"}
    with access.client(timeout_s, redirects=True) as client:
        with client.stream("GET", url, headers=accept) as answer:
            if answer.url.netloc != httpx.URL(url).netloc:
                return Unknown(f"{url}: redirected to another server, {answer.url}")
            if answer.status_code != 200:
                return Unknown(f"{url}: HTTP {answer.status_code}")
            body = bytearray()
            for piece in answer.iter_bytes():
                body += piece
                if len(body) > max_bytes:
                    return Unknown(f"{url}: page is larger than {max_bytes} bytes")
                if clock() > deadline:
                    return Unknown(f"{url}: no complete page within {timeout_s:g} s ({len(body)} bytes came)")
    page = parse_exposition(bytes(body), scraped_at=clock(), max_bytes=max_bytes)
    return Unknown(f"{url}: {page.reason}") if isinstance(page, Unknown) else page
