"""Fetch the metrics pages of all engines at once, each from the engine itself, never through the router."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import httpx

from pytest_pdperf.stack.access import LOOPBACK, Access

from .exposition import MAX_PAGE_BYTES, Snapshot, Unknown, parse_exposition

Clock = Callable[[], float]

_ACCEPT = {"Accept": "text/plain; version=0.0.4", "Accept-Encoding": "identity"}


def metrics_url(base: str) -> str:
    """Where an engine with this base URL prints its metrics; a URL that already ends in /metrics is kept."""
    trimmed = base.rstrip("/")
    return trimmed if trimmed.endswith("/metrics") else f"{trimmed}/metrics"


class Scraper:
    """Reads the same pages again and again over connections and threads that stay. Use as a context manager."""

    def __init__(
        self,
        urls: Mapping[str, str],
        *,
        clock: Clock = time.monotonic,
        max_bytes: int = MAX_PAGE_BYTES,
        access: Access = LOOPBACK,
    ) -> None:
        """`urls` maps instance ids to base URLs; `access` lets the suite in where a key is asked for."""
        self._urls = {name: metrics_url(base) for name, base in urls.items()}
        self._clock, self._max_bytes = clock, max_bytes
        count = max(1, min(32, len(urls)))
        self._pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix="scrape")
        self._http = access.client(redirects=True)

    def read(
        self, timeout_s: float = 5.0, *, only: Collection[str] | None = None
    ) -> dict[str, Snapshot | Unknown]:
        """Read all pages concurrently: instance id -> snapshot, or the reason why there is none.

        `timeout_s` bounds each page as a whole, also one that drips byte by byte. With `only`, series of other names
        are left out. Never raises for what a server does.
        """
        pages = {
            name: self._pool.submit(self._page, url, timeout_s, only) for name, url in self._urls.items()
        }
        return {name: page.result() for name, page in pages.items()}

    def close(self) -> None:
        """Close connections and end threads."""
        self._pool.shutdown()
        self._http.close()

    def __enter__(self) -> Scraper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _page(self, url: str, timeout_s: float, only: Collection[str] | None) -> Snapshot | Unknown:
        try:
            return self._fetch(url, timeout_s, only)
        except httpx.TimeoutException as problem:
            return Unknown(f"{url}: no complete page within {timeout_s:g} s ({type(problem).__name__})")
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as problem:
            return Unknown(f"{url}: {type(problem).__name__}: {problem}")

    def _fetch(self, url: str, timeout_s: float, only: Collection[str] | None) -> Snapshot | Unknown:
        deadline = self._clock() + timeout_s
        limit = self._max_bytes
        with self._http.stream("GET", url, timeout=timeout_s, headers=_ACCEPT) as answer:
            if answer.url.netloc != httpx.URL(url).netloc:
                return Unknown(f"{url}: redirected to another server, {answer.url}")
            if answer.status_code != 200:
                return Unknown(f"{url}: HTTP {answer.status_code}")
            body = bytearray()
            for piece in answer.iter_bytes():
                body += piece
                if len(body) > limit:
                    return Unknown(f"{url}: page is larger than {limit} bytes")
                if self._clock() > deadline:
                    return Unknown(f"{url}: no complete page within {timeout_s:g} s ({len(body)} bytes came)")
        page = parse_exposition(bytes(body), scraped_at=self._clock(), max_bytes=limit, only=only)
        return Unknown(f"{url}: {page.reason}") if isinstance(page, Unknown) else page


def scrape(
    urls: Mapping[str, str],
    timeout_s: float = 5.0,
    *,
    clock: Clock = time.monotonic,
    max_bytes: int = MAX_PAGE_BYTES,
    access: Access = LOOPBACK,
) -> dict[str, Snapshot | Unknown]:
    """Read all pages once, see `Scraper.read`; `access` lets the suite in where a key is asked for."""
    if not urls:
        return {}
    with Scraper(urls, clock=clock, max_bytes=max_bytes, access=access) as scraper:
        return scraper.read(timeout_s)
