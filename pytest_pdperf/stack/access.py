"""How to be let in by a server that is not ours: its API key and its certificate, in one place for every client.

The key itself is never stored: only the name of the environment variable that holds it.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.stack.secrets import mask

KEY_VARIABLE = "PDPERF_API_KEY"
"""Holds the key when the user names no other variable."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a deployment asks of its clients. The default is loopback's: no key, and TLS against the system's roots."""

    key_env: str | None = None
    """Environment variable with the API key, sent as `Authorization: Bearer`; None sends none."""
    ca_file: str | None = None
    """PEM file with the authorities to trust instead of the system's."""
    verify: bool = True

    def headers(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """The authorization header. Raises UsageProblem when the variable is unset or holds what no header may."""
        if self.key_env is None:
            return {}
        value = (os.environ if environ is None else environ).get(self.key_env, "")
        if not value:
            raise UsageProblem(f"API key: environment variable {self.key_env} is not set")
        if not value.isascii() or not value.isprintable() or value != value.strip():
            raise UsageProblem(
                f"API key from {self.key_env}: not a valid header value (spaces or line ends?)"
            )
        return {"Authorization": f"Bearer {value}"}

    def secrets(self) -> tuple[str, ...]:
        """Texts that must appear in no message and no record."""
        value = os.environ.get(self.key_env, "") if self.key_env else ""
        return (value,) if value else ()

    def masked(self, text: str) -> str:
        """A text that came from outside, without the key."""
        return mask(text, self.secrets())

    def tls(self) -> ssl.SSLContext:
        """Client context that verifies unless told otherwise. Raises UsageProblem for a file with no certificate."""
        try:
            return _context(self.ca_file, self.verify)
        except FileNotFoundError:
            raise UsageProblem(f"CA file {self.ca_file}: no such file") from None
        except OSError as problem:  # ssl.SSLError is one
            why = "no certificate in PEM form" if isinstance(problem, ssl.SSLError) else problem.strerror
            raise UsageProblem(f"CA file {self.ca_file}: {why}") from None

    def client(self, timeout_s: float = 5.0, *, redirects: bool = False) -> httpx.Client:
        """An HTTP client with the key and the certificate; like every client of the suite it uses no proxy."""
        return httpx.Client(
            trust_env=False,
            timeout=timeout_s,
            headers=self.headers(),
            verify=self.tls(),
            follow_redirects=redirects,
            max_redirects=3,
        )

    def describe(self, url: str) -> str:
        """What is said of TLS in records: `none`, `verified`, `verified against FILE` or `NOT VERIFIED`."""
        if not url.startswith("https:"):
            return "none"
        if not self.verify:
            return "NOT VERIFIED"
        return f"verified against {Path(self.ca_file).name}" if self.ca_file else "verified"


LOOPBACK = Access()


@cache
def _context(ca_file: str | None, verify: bool) -> ssl.SSLContext:
    """Reading the system's roots takes a while and every scrape opens clients: read them once."""
    context = ssl.create_default_context(cafile=ca_file)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
