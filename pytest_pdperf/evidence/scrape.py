"""Fetch the metrics pages of all engines at once, each from the engine itself, never through the router."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from pytest_pdperf.stack.access import LOOPBACK, Access

from .exposition import MAX_PAGE_BYTES, Snapshot, Unknown, parse_exposition
from .fetch import NoPage, Page

Clock = Callable[[], float]


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
        self._pages = {
            name: Page(metrics_url(base), access, max_bytes=max_bytes, clock=clock)
            for name, base in urls.items()
        }
        self._clock, self._max_bytes = clock, max_bytes
        count = max(1, min(32, len(urls)))
        self._pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix="scrape")

    def read(
        self, timeout_s: float = 5.0, *, only: Collection[str] | None = None
    ) -> dict[str, Snapshot | Unknown]:
        """Read all pages concurrently: instance id -> snapshot, or the reason why there is none.

        `timeout_s` bounds each page as a whole, also one that drips byte by byte. With `only`, series of other names
        are left out. Never raises for what a server does.
        """
        pages = {
            name: self._pool.submit(self._page, page, timeout_s, only) for name, page in self._pages.items()
        }
        return {name: page.result() for name, page in pages.items()}

    def close(self) -> None:
        """Close connections and end threads."""
        self._pool.shutdown()
        for page in self._pages.values():
            page.close()

    def __enter__(self) -> Scraper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _page(self, page: Page, timeout_s: float, only: Collection[str] | None) -> Snapshot | Unknown:
        try:
            body = page.read(timeout_s)
        except NoPage as problem:
            return Unknown(str(problem))
        found = parse_exposition(body, scraped_at=self._clock(), max_bytes=self._max_bytes, only=only)
        return Unknown(f"{page.url}: {found.reason}") if isinstance(found, Unknown) else found


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
