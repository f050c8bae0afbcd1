"""Request bytes, encoded before the clock starts: nothing is serialised while a request waits to be sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from pytest_pdperf.errors import UsageProblem

from .planned import Planned
from .target import Target
from .words import text_of

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")


def body_of(request: Planned, target: Target) -> bytes:
    """JSON body of one request: greedy, fixed length, streamed, token counts of the server asked for."""
    data: dict[str, Any]
    if target.api == "generate":
        data = {
            "input_ids": request.prompt,
            "sampling_params": {
                "max_new_tokens": request.output_tokens,
                "ignore_eos": True,
                "temperature": 0,
            },
            "stream": True,
        }
    else:
        prompt: dict[str, Any] = {"prompt": request.prompt}
        if target.api == "chat":
            prompt = {"messages": [{"role": "user", "content": text_of(request.prompt)}]}
        usage = {"include_usage": True} | ({"continuous_usage_stats": True} if target.running_usage else {})
        data = {"model": target.model} | prompt
        data |= {"max_tokens": request.output_tokens, "ignore_eos": True, "temperature": 0}
        data |= {"stream": True, "stream_options": usage}
    return orjson.dumps(data | dict(target.extra_body))


def headers_of(target: Target, environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Headers whose values live in the environment. Raises UsageProblem for a variable that is not set."""
    found = []
    for name, variable in target.headers_from_env.items():
        value = environ.get(variable)
        if value is None:
            raise UsageProblem(f"header {name!r}: environment variable {variable} is not set")
        if not _TOKEN.match(name) or "\r" in value or "\n" in value:
            raise UsageProblem(f"header {name!r} from {variable}: not a valid header name or value")
        found.append((name, value))
    return (*found, *target.access.headers(environ).items())


def http_request(
    body: bytes, target: Target, request_id: str, headers: tuple[tuple[str, str], ...] = ()
) -> bytes:
    """Head and body of one POST, as handed to the kernel in one piece."""
    lines = [
        f"POST {target.path} HTTP/1.1",
        f"Host: {target.host_header}",
        "User-Agent: pytest-pdperf",
        "Accept: text/event-stream",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"X-Request-Id: {request_id}",
    ]
    if not target.keep_alive:
        lines.append("Connection: close")
    lines.extend(f"{name}: {value}" for name, value in headers)
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
