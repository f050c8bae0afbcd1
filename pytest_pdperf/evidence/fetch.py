"""One metrics page, read again and again: a general HTTP client takes five times the CPU for it, every second."""

from __future__ import annotations

import base64
import ssl
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from pytest_pdperf.stack.access import Access

REDIRECTS = 3
_PIECE = 1 << 16
_HEADERS = {"Accept": "text/plain; version=0.0.4", "Accept-Encoding": "identity"}


class NoPage(Exception):
    """Why there is no page; one line that begins with its address."""


class Page:
    """The page behind one URL, over a connection that stays. For one thread at a time; closed by `close`."""

    def __init__(
        self, url: str, access: Access, *, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.url = url
        self._access, self._max_bytes, self._clock = access, max_bytes, clock
        self._headers = {**_HEADERS, **access.headers()}
        self._scheme = ""
        self._connection: HTTPConnection | None = None

    def read(self, timeout_s: float) -> bytes:
        """The whole page. Raises NoPage, also when it is not there within `timeout_s` however it drips."""
        deadline = self._clock() + timeout_s
        try:
            body = self._read(deadline)
        except TimeoutError:
            self.close()
            raise NoPage(f"{self.url}: no complete page within {timeout_s:g} s") from None
        except (HTTPException, OSError, ValueError) as problem:
            self.close()
            raise NoPage(f"{self.url}: {type(problem).__name__}: {problem}") from None
        except NoPage:
            self.close()
            raise
        return body

    def close(self) -> None:
        """Close the connection; the next read opens one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _read(self, deadline: float) -> bytes:
        url = self.url
        here = urlsplit(url)
        for _ in range(1 + REDIRECTS):
            answer = self._ask(urlsplit(url), deadline)
            there = answer.headers.get("Location")
            if answer.status not in (301, 302, 303, 307, 308) or there is None:
                if answer.status != 200:
                    raise NoPage(f"{self.url}: HTTP {answer.status}")
                return self._body(answer, deadline)
            url = urljoin(url, there)
            if urlsplit(url).netloc != here.netloc:
                raise NoPage(f"{self.url}: redirected to another server, {url}")
            self._body(answer, deadline)
        raise NoPage(f"{self.url}: more than {REDIRECTS} redirects")

    def _ask(self, parts: SplitResult, deadline: float) -> HTTPResponse:
        if self._connection is not None and self._scheme != parts.scheme:
            self.close()
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        kept = self._connection is not None and self._connection.sock is not None
        try:
            return self._send(parts, path, deadline)
        except ConnectionError:
            # A server may close a connection that is idle; that is known only once it is used again.
            if not kept:
                raise
            self.close()
            return self._send(parts, path, deadline)

    def _send(self, parts: SplitResult, path: str, deadline: float) -> HTTPResponse:
        if self._connection is None:
            self._connection = _connection(parts, self._access.tls if parts.scheme == "https" else None)
            self._scheme = parts.scheme
        left = self._left(deadline)
        self._connection.timeout = left
        if self._connection.sock is not None:
            self._connection.sock.settimeout(left)
        self._connection.request("GET", path, headers={**_credentials(parts), **self._headers})
        return self._connection.getresponse()

    def _body(self, answer: HTTPResponse, deadline: float) -> bytes:
        sock = self._connection.sock if self._connection is not None else None
        body = bytearray()
        size = answer.length
        while (size is None or len(body) < size) and (piece := answer.read1(_PIECE)):
            body += piece
            if len(body) > self._max_bytes:
                raise NoPage(f"{self.url}: page is larger than {self._max_bytes} bytes")
            left = self._left(deadline)
            if sock is not None:
                sock.settimeout(left)
        if size is not None and len(body) < size:
            raise IncompleteRead(bytes(body[-20:]), size - len(body))
        answer.close()
        return bytes(body)

    def _left(self, deadline: float) -> float:
        left = deadline - self._clock()
        if left <= 0:
            raise TimeoutError
        return left


def _connection(parts: SplitResult, tls: Callable[[], ssl.SSLContext] | None) -> HTTPConnection:
    host = parts.netloc.rpartition("@")[2]
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError("not the address of a web server")
    return HTTPConnection(host) if tls is None else HTTPSConnection(host, context=tls())


def _credentials(parts: SplitResult) -> dict[str, str]:
    """What stands before the host, as every HTTP client sends it."""
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
