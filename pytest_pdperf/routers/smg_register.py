"""Becomes smg and registers its workers meanwhile: `python -m pytest_pdperf.routers.smg_register ... -- smg launch`.

The process that was started turns into smg, so that what is watched, measured and ended is smg itself. A child, gone
within the deadline, asks each worker what it is and registers it with what smg has to know. When that fails the child
says why and ends smg: a router that transfers nothing must not come up.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

CONNECTORS = {"nixl": "NixlConnector", "mooncake": "MooncakeConnector"}
DEADLINE_S = 60.0
_TICK_S = 0.05
_ANSWER_S = 5.0
_KNOWN = 409

Fetch = Callable[[str, Mapping[str, object] | None], Any]
"""(URL, JSON body or None for GET) -> the parsed answer, None when there is no JSON answer."""


class RegisterError(Exception):
    """A worker could not be registered: one line that says which and why."""


def fetch(url: str, body: Mapping[str, object] | None = None) -> Any:
    """One request over loopback, past any proxy; None without a JSON answer.

    Raises RegisterError when a POST is refused; that a worker is known already is no refusal.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_S) as answer:
            return json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as refusal:
        if body is None:
            return None
        if refusal.code == _KNOWN:
            return {}
        text = refusal.read(300).decode("utf-8", "replace")
        raise RegisterError(f"{url} refused {json.dumps(body)}: HTTP {refusal.code} {text}") from None
    except (OSError, ValueError):
        return None


def runtime_of(url: str, ask: Fetch) -> str:
    """`sglang` or `vllm`, by which of their routes the worker has. Raises RegisterError for neither."""
    info = ask(f"{url}/server_info", None)
    if isinstance(info, dict) and "disaggregation_mode" in info:
        return "sglang"
    version = ask(f"{url}/version", None)
    if isinstance(version, dict) and "version" in version:
        return "vllm"
    raise RegisterError(f"{url} answers neither /server_info like SGLang nor /version like vLLM")


def registration(url: str, role: str, bootstrap: int, connector: str, ask: Fetch) -> dict[str, object]:
    """The body of `POST /workers` for one worker. Raises RegisterError when something needed is unknown."""
    runtime = runtime_of(url, ask)
    body: dict[str, object] = {"url": url, "worker_type": role, "runtime_type": runtime}
    if runtime == "vllm" and connector in CONNECTORS:
        body["kv_connector"] = CONNECTORS[connector]
    if role == "prefill" and bootstrap and (runtime == "sglang" or connector == "mooncake"):
        body["bootstrap_port"] = bootstrap
    if role == "prefill" and runtime == "vllm" and connector == "mooncake":
        host = urlsplit(url).hostname
        engines = ask(f"http://{host}:{bootstrap}/query", None)
        try:
            body["kv_engine_id"] = str(next(iter(engines.values()))["engine_id"])
        except (AttributeError, KeyError, StopIteration, TypeError):
            raise RegisterError(f"no engine id from Mooncake's bootstrap port {host}:{bootstrap}") from None
    return body


def register(
    router: str,
    workers: Sequence[tuple[str, str, int]],
    connector: str,
    deadline_s: float,
    ask: Fetch = fetch,
) -> list[str]:
    """Wait for the router's port and register every (URL, role, bootstrap port); one line about each.

    Raises RegisterError at `deadline_s` seconds at the latest.
    """
    until = time.monotonic() + deadline_s
    bodies = [registration(url, role, bootstrap, connector, ask) for url, role, bootstrap in workers]
    lines = []
    for body in bodies:
        while ask(f"{router}/workers", body) is None:
            if time.monotonic() > until:
                raise RegisterError(
                    f"{router}/workers took no worker within {deadline_s:g} s: {json.dumps(body)}"
                )
            time.sleep(_TICK_S)
        lines.append(" ".join(f"{key}={value}" for key, value in body.items()))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Fork the registering child and become the program after `--`."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="smg_register", description=__doc__)
    parser.add_argument("--router", required=True)
    parser.add_argument("--connector", required=True)
    parser.add_argument("--prefill", nargs=2, action="append", default=[], metavar=("URL", "BOOTSTRAP_PORT"))
    parser.add_argument("--decode", action="append", default=[], metavar="URL")
    if "--" not in given or given[-1] == "--":
        parser.error("the command to become is missing after --")
    cut = given.index("--")
    options, program = parser.parse_args(given[:cut]), given[cut + 1 :]
    workers = [(url, "prefill", int(port)) for url, port in options.prefill]
    workers += [(url, "decode", 0) for url in options.decode]
    smg = os.pidfd_open(os.getpid())
    if (child := os.fork()) != 0:
        os.waitpid(child, 0)  # it has left a grandchild, which smg need not know
        os.execvp(program[0], program)
    if os.fork() != 0:
        os._exit(0)
    try:
        for line in register(options.router, workers, options.connector, DEADLINE_S):
            print(f"pdperf: registered {line}", flush=True)
    except RegisterError as problem:
        print(f"error: pdperf: {problem}", file=sys.stderr, flush=True)
        signal.pidfd_send_signal(smg, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
