"""Where the load goes: one frozen description of the server that prompts, bodies and connections all read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.stack.access import Access

Api = Literal["completions", "chat", "generate"]

PATHS: Mapping[str, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "generate": "/generate",
}


@dataclass(frozen=True, slots=True)
class Target:
    """The server under load and how it wants to be spoken to.

    Raises `UsageProblem` for a URL or an api that no request could be sent to.
    """

    url: str
    """Base URL without the API path, `http://127.0.0.1:8000`."""
    model: str
    api: Api = "completions"
    vocab: tuple[int, int] = (1000, 30000)
    """Token ids to draw prompts from: first included, last excluded. Keep special tokens out of it."""
    headers_from_env: Mapping[str, str] = field(default_factory=dict)
    """Header name -> name of the environment variable that holds its value; the value is never stored."""
    max_context: int | None = None
    """Longest prompt plus output that the server takes, in tokens; None when unknown."""
    key_env: str | None = None
    """Environment variable with an API key, sent as `Authorization: Bearer`; the key is never stored."""
    verify_tls: bool = True
    ca_file: str | None = None
    """PEM file with the authorities to trust instead of the system's."""
    keep_alive: bool = True
    """False opens a fresh connection for every request, ahead of its clock."""
    quick_ack: bool = True
    """Acknowledge response heads at once (TCP_QUICKACK). False leaves it to the kernel, as usual."""
    running_usage: bool = False
    """Ask for token counts on every event: exact `event_tokens` where an event carries several tokens."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Merged into every request body, later wins."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageProblem(f"target url {self.url!r}: want http://HOST:PORT or https://HOST:PORT")
        if parts.query or parts.fragment:
            raise UsageProblem(f"target url {self.url!r}: a base URL has no query and no fragment")
        if self.api not in get_args(Api):
            near = difflib.get_close_matches(str(self.api), get_args(Api), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageProblem(f"target api {self.api!r}: want one of {', '.join(get_args(Api))}{hint}")
        low, high = self.vocab
        if not 0 <= low < high:
            raise UsageProblem(f"target vocab {low}..{high}: want 0 <= first < last")

    @property
    def access(self) -> Access:
        """Key and certificate for clients that are not the timed one."""
        return Access(self.key_env, self.ca_file, self.verify_tls)

    @property
    def host(self) -> str:
        """Host name or address without brackets."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """TCP port, the scheme's own when the URL names none."""
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def tls(self) -> bool:
        """True for https: receive stamps are then user-space ones."""
        return urlsplit(self.url).scheme == "https"

    @property
    def path(self) -> str:
        """Path of the request line."""
        return urlsplit(self.url).path.rstrip("/") + PATHS[self.api]

    @property
    def host_header(self) -> str:
        """Value of the Host header."""
        return urlsplit(self.url).netloc.rpartition("@")[2]

    def to_json(self) -> dict[str, Any]:
        """Plain data for the worker's job file; holds names of environment variables, never their values."""
        return asdict(self) | {
            "headers_from_env": dict(self.headers_from_env),
            "extra_body": dict(self.extra_body),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Target:
        """Inverse of `to_json`."""
        low, high = data["vocab"]
        return cls(**{**data, "vocab": (int(low), int(high))})
