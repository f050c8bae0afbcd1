"""Looks at a deployment that runs already: is it an LLM server, what does it serve, are the roles what they are called.

Only reads. What costs the deployment a request is in `greeting`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import httpx

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.evidence.exposition import Snapshot, Unknown, parse_exposition
from pytest_pdperf.evidence.readings import engine_of
from pytest_pdperf.evidence.scrape import metrics_url
from pytest_pdperf.spec.topology import Role
from pytest_pdperf.spec.validation import suggestion
from pytest_pdperf.stack.access import KEY_VARIABLE, Access

from .named import Named

LOOK_S = 10.0
"""Time-out of one look."""
SHOWN = 120
"""Characters of a strange answer that a message repeats."""
_VERSIONS = ("/version", "/server_info", "/get_server_info")
_OWNERS = ("vllm", "sglang")
"""What engines call themselves in their lists of models, which most front doors pass on."""
_SGLANG_MODES: Mapping[str, Role] = {"prefill": Role.PREFILL, "decode": Role.DECODE, "null": Role.SERVER}


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment as it presents itself."""

    named: Named
    model: str
    max_context: int | None = None
    """Longest prompt plus output in tokens that the target claims; None when it does not say."""
    engine: str = "unknown"
    version: str = "unknown"
    """Of the engines, where they can be asked; else what the front door says of itself."""
    simulated: bool = False
    watchable: Mapping[str, str] = field(default_factory=dict)
    """`target` and instance ids -> URLs that answer `/health`: if they stop doing so, the deployment hangs."""
    notes: tuple[str, ...] = ()
    """What is not known and should be."""


def look(named: Named, wanted_models: tuple[str, ...], engine: str | None = None) -> Deployment:
    """Ask the front door for its models and every named engine for its metrics.

    `wanted_models` are names of which one has to be served, in order of preference; empty takes the only one there
    is. `engine` is what the user says it is. Raises UsageProblem for no answer, a refused key, a server of another
    kind, a model that is not served, and a role URL that is none.
    """
    with named.access.client(LOOK_S) as http:
        listed = _models(http, named)
        model, context = _model(listed, wanted_models)
        owner = next(str(one.get("owned_by") or "") for one in listed if one["id"] == model)
        found = {
            name: _engine(http, named.access, name, role, url) for name, (role, url) in named.engines.items()
        }
        version = _version(http, [_base(url) for url in named.urls.values()] or [named.url])
        watchable = {
            name: url
            for name, url in {"target": named.url, **{n: _base(u) for n, u in named.urls.items()}}.items()
            if _healthy(http, url)
        }
    kinds = sorted(set(found.values()))
    if len(kinds) > 1:
        shown = ", ".join(f"{name} {kind}" for name, kind in found.items())
        raise UsageProblem(f"--target-role: engines of different kinds: {shown}")
    seen = kinds[0] if kinds else owner if owner in _OWNERS else "unknown"
    simulated = "simulated" in version or owner.startswith("pdperf-sim")
    return replace(
        Deployment(named, model, context, _agreed(engine, seen, simulated), version or "unknown", simulated),
        watchable=watchable,
        notes=_notes(named),
    )


def _agreed(said: str | None, seen: str, simulated: bool) -> str:
    """Name of the engine: what was said, unless what was seen contradicts it."""
    kind = said.removeprefix("sim-") if said and said != "sim" else "vllm" if said == "sim" else None
    if said is not None and said.startswith("sim") and not simulated:
        raise UsageProblem(
            f"--engine {said}: --target launches nothing, and what runs there is not simulated"
        )
    if kind is not None and seen not in ("unknown", kind):
        raise UsageProblem(f"--engine {said}: the engines behind the target print the metrics of {seen}")
    name = kind or seen
    if simulated and name != "unknown":
        return "sim" if name == "vllm" else f"sim-{name}"
    return "sim" if simulated else name


def _notes(named: Named) -> tuple[str, ...]:
    notes = []
    if not named.engines:
        notes.append(
            "target: no engine is named (--target-role), so where requests were served is not known: no evidence, no "
            "TTFT stages, no leak check"
        )
    insecure = [u for u in (named.url, *named.urls.values()) if named.access.describe(u) == "NOT VERIFIED"]
    if insecure:
        notes.append("target: the certificate was NOT VERIFIED (--target-insecure)")
    plain = [u for u in (named.url, *named.urls.values()) if u.startswith("http:") and not _loopback(u)]
    if named.access.key_env and plain:
        notes.append(f"target: the API key went over the network unencrypted, to {plain[0]}")
    return tuple(notes)


def _loopback(url: str) -> bool:
    host = httpx.URL(url).host
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _base(url: str) -> str:
    """Where an engine answers other questions than for its metrics."""
    return url.removesuffix("/metrics")


def _get(http: httpx.Client, access: Access, url: str, what: str) -> httpx.Response:
    """An answer below 300, or a UsageProblem that says what came instead and what to do."""
    try:
        answer = http.get(url)
    except httpx.TimeoutException:
        raise UsageProblem(f"{what} {url}: no answer within {LOOK_S:g} s") from None
    except httpx.HTTPError as problem:
        text = access.masked(str(problem) or type(problem).__name__)
        hint = ""
        if "CERTIFICATE_VERIFY" in text:
            hint = (
                "; name its authority with --target-ca FILE, or accept it unverified with --target-insecure"
            )
        elif "WRONG_VERSION" in text or "UNKNOWN_PROTOCOL" in text:
            hint = "; does it speak http:// there?"
        elif isinstance(problem, httpx.RemoteProtocolError | httpx.ReadError) and url.startswith("http:"):
            hint = "; does it speak https:// there?"
        raise UsageProblem(f"{what} {url}: no answer ({text}){hint}") from None
    if answer.status_code in (401, 403):
        why = (
            f"it refuses the key in {access.key_env}"
            if access.key_env
            else f"it wants an API key: put it into {KEY_VARIABLE}, or name its variable with --target-api-key-env"
        )
        raise UsageProblem(f"{what} {url}: HTTP {answer.status_code}: {why}")
    if answer.is_redirect:
        to = access.masked(answer.headers.get("location", "?"))
        raise UsageProblem(f"{what} {url}: redirects to {to}; give the address that answers itself")
    return answer


def _shown(answer: httpx.Response, access: Access) -> str:
    kind = answer.headers.get("content-type", "no content type").partition(";")[0]
    text = " ".join(access.masked(answer.text[: 20 * SHOWN]).split())[:SHOWN]
    return f"HTTP {answer.status_code}, {kind}, {text!r}"


def _models(http: httpx.Client, named: Named) -> list[Mapping[str, object]]:
    answer = _get(http, named.access, f"{named.url}/v1/models", "--target")
    try:
        listed = answer.json()["data"] if answer.status_code == 200 else []
        models = [model for model in listed if isinstance(model["id"], str)]
    except (ValueError, LookupError, TypeError):
        models = []
    if not models:
        raise UsageProblem(
            f"--target {named.url}: answers, but is no LLM server: /v1/models gave {_shown(answer, named.access)}"
        )
    return models


def _model(listed: list[Mapping[str, object]], wanted: tuple[str, ...]) -> tuple[str, int | None]:
    """(name to ask for, its longest context). Adapters, which name a parent, are taken only when they are asked for."""
    names = [str(model["id"]) for model in listed]
    own = [str(model["id"]) for model in listed if not model.get("parent")]
    chosen = next((name for name in wanted if name in names), None)
    if chosen is None and wanted:
        raise UsageProblem(
            f"--model {wanted[0]}: the target serves {', '.join(names)}{suggestion(wanted[0], names)}"
        )
    if chosen is None and len(own) != 1:
        raise UsageProblem(f"the target serves {', '.join(names)}: say which with --served-model")
    chosen = chosen or own[0]
    limits = [model.get("max_model_len") for model in listed if model["id"] == chosen]
    return chosen, next((n for n in limits if isinstance(n, int) and not isinstance(n, bool) and n > 0), None)


def _engine(http: httpx.Client, access: Access, name: str, role: Role, url: str) -> str:
    """Which engine prints the metrics there. Raises UsageProblem when none does, or one of another role."""
    place = f"--target-role {role.value}:"
    answer = _get(http, access, metrics_url(url), place)
    page: Snapshot | Unknown
    if answer.status_code != 200:
        page = Unknown(_shown(answer, access))
    else:
        page = parse_exposition(answer.content, scraped_at=0.0)
    leave = "SGLang needs --enable-metrics; without metrics leave the roles out, and evidence is unknown"
    if isinstance(page, Unknown):
        raise UsageProblem(f"{place} {metrics_url(url)}: no metrics page ({page.reason}); {leave}")
    engine = engine_of(page)
    if engine is None:
        some = ", ".join(sorted(page.series)[:3]) or "none"
        raise UsageProblem(
            f"{place} {metrics_url(url)}: metrics of no known engine ({some}); a role URL is the engine's own address, "
            "not the router's"
        )
    mode = _sglang_mode(http, _base(url)) if engine == "sglang" else None
    if mode is not None and mode is not role:
        raise UsageProblem(
            f"{place} {url}: this engine says that it is a {mode.value} engine; are roles mixed up?"
        )
    return engine


def _sglang_mode(http: httpx.Client, base: str) -> Role | None:
    for path in _VERSIONS[1:]:
        try:
            told = http.get(base + path).json().get("disaggregation_mode")
        except (httpx.HTTPError, ValueError, AttributeError):
            continue
        if isinstance(told, str):
            return _SGLANG_MODES.get(told)
    return None


def _version(http: httpx.Client, bases: list[str]) -> str:
    """What the first of these servers that says so calls its version; empty when none does."""
    for base in bases:
        for path in _VERSIONS:
            try:
                answer = http.get(base + path)
                told = answer.json().get("version") if answer.status_code == 200 else None
            except (httpx.HTTPError, ValueError, AttributeError):
                continue
            if isinstance(told, str) and told:
                return told[:SHOWN]
    return ""


def _healthy(http: httpx.Client, url: str) -> bool:
    try:
        return http.get(f"{url}/health").status_code < 500
    except httpx.HTTPError:
        return False
