"""What the user says about a deployment that runs already: checked as text, before anybody is asked anything."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.options import BY_NAME, Settings
from pytest_pdperf.spec.topology import Kind, KvTransfer, Role, RoleSpec, Topology
from pytest_pdperf.spec.validation import suggestion
from pytest_pdperf.stack.access import KEY_VARIABLE, Access
from pytest_pdperf.stack.secrets import mask

ROUTER = "router"
ROLE_WORDS = (*(role.value for role in Role), ROUTER)

LAUNCHING = (
    "gpus",
    "reference",
    "engine_env",
    "engine_arg",
    "sim_fault",
    "gpu_wait",
    "gpu_inventory",
    "overlap_start",
    "launcher",
    "slurm_arg",
    "slurm_gres",
)
"""Options about bringing engines up, which say nothing where none is brought up."""


@dataclass(frozen=True, slots=True)
class Named:
    """A deployment by its addresses."""

    url: str
    """Base URL of the front door."""
    engines: Mapping[str, tuple[Role, str]] = field(default_factory=dict)
    """Instance id (`prefill-0`) -> role and URL of an engine behind it, in the order given."""
    routers: tuple[str, ...] = ()
    access: Access = field(default_factory=Access)
    api: str = "auto"
    hardware: str = ""

    @property
    def roles(self) -> dict[str, Role]:
        """Instance id -> role."""
        return {name: role for name, (role, _) in self.engines.items()}

    @property
    def urls(self) -> dict[str, str]:
        """Instance id -> URL."""
        return {name: url for name, (_, url) in self.engines.items()}

    def count(self, role: Role) -> int:
        """How many engines of a role are named."""
        return sum(own is role for own in self.roles.values())


def read_named(
    settings: Settings,
    environ: Mapping[str, str] | None = None,
    *,
    target: str | None = None,
    roles: Sequence[str] = (),
) -> Named:
    """The `--target...` options; `target` and `roles` are for those who find addresses in another way.

    Raises UsageProblem for what contradicts itself or cannot be an address.
    """
    for name in LAUNCHING:
        if name in settings.given:
            flag = BY_NAME[name].flag
            place = "--k8s" if settings["k8s"] else "--target"
            raise UsageProblem(
                f"{flag} is about engines to bring up, {place} brings none up; drop one of them"
            )
    if settings["launches"] != 1:
        raise UsageProblem(
            "--launches: a deployment behind --target is one launch however often it is measured; deploy it again "
            "between runs instead"
        )
    url = base_url(target or settings["target"], "--target")
    engines, routers = _roles([*settings["target_role"], *roles], url)
    named = Named(
        url,
        engines,
        routers,
        _access(settings, os.environ if environ is None else environ),
        settings["target_api"],
        (settings["target_hardware"] or "").strip(),
    )
    if settings["target_ca"] or settings["target_insecure"]:
        which = "--target-ca" if settings["target_ca"] else "--target-insecure"
        if not any(one.startswith("https:") for one in (url, *named.urls.values(), *routers)):
            raise UsageProblem(f"{which} is about certificates, and no URL of this run is https://")
    return named


def without_target(settings: Settings) -> None:
    """Raise UsageProblem for an option about a target when there is none."""
    for name in sorted(settings.given):
        if name.startswith("target_"):
            raise UsageProblem(f"{BY_NAME[name].flag} does nothing without --target URL")


def without_k8s(settings: Settings) -> None:
    """Raise UsageProblem for an option about a cluster when there is none."""
    for name in sorted(settings.given):
        if name.startswith("k8s_"):
            raise UsageProblem(f"{BY_NAME[name].flag} does nothing without --k8s NAMESPACE")


def base_url(text: str, place: str) -> str:
    """A URL as it was given, without the API's own path at its end. Raises UsageProblem; never repeats a password."""
    shown = mask(text)
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError as problem:
        raise UsageProblem(f"{place} {shown!r}: {problem}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise UsageProblem(f"{place} {shown!r}: want http://HOST:PORT or https://HOST:PORT")
    if parts.username or parts.password:
        raise UsageProblem(
            f"{place} {shown!r}: credentials do not belong into a URL, which is kept in records; "
            "put the key into an environment variable and name it with --target-api-key-env"
        )
    if parts.query or parts.fragment:
        raise UsageProblem(f"{place} {shown!r}: a base URL has no query and no fragment")
    path = parts.path.rstrip("/")
    for end in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1"):
        path = path.removesuffix(end)
    return f"{parts.scheme}://{parts.netloc}{path}"


def _roles(texts: Sequence[str], target: str) -> tuple[dict[str, tuple[Role, str]], tuple[str, ...]]:
    engines: dict[str, tuple[Role, str]] = {}
    routers: list[str] = []
    for text in texts:
        word, separator, address = text.partition("=")
        word = word.strip()
        if not separator or word not in ROLE_WORDS:
            raise UsageProblem(
                f"--target-role {mask(text)!r}: want ROLE=URL with a role of {', '.join(ROLE_WORDS)}"
                f"{suggestion(word, ROLE_WORDS)}"
            )
        url = base_url(address, f"--target-role {word}")
        if url in [known for _, known in engines.values()]:
            raise UsageProblem(f"--target-role {word}={url}: this engine is named twice")
        if word == ROUTER:
            routers.append(url)
            continue
        role = Role(word)
        if url == target and role is not Role.SERVER:
            raise UsageProblem(
                f"--target-role {word}={url}: this is the target itself; an engine behind it has an address of its own"
            )
        number = sum(own is role for own, _ in engines.values())
        engines[f"{role.value}-{number}"] = (role, url)
    named = {role for role, _ in engines.values()}
    if Role.SERVER in named and len(named) > 1:
        raise UsageProblem("--target-role: a deployment has servers, or prefill and decode, not both")
    missing = {Role.PREFILL, Role.DECODE} - named
    if named and Role.SERVER not in named and missing:
        (lacking,) = missing
        raise UsageProblem(
            f"--target-role: no {lacking.value} engine is named, without which nothing is proven; name it, or no role"
        )
    return engines, tuple(routers)


def _access(settings: Settings, environ: Mapping[str, str]) -> Access:
    name: str | None = settings["target_api_key_env"]
    if name is not None and not environ.get(name):
        raise UsageProblem(f"--target-api-key-env {name}: this environment variable is not set")
    if name is None and environ.get(KEY_VARIABLE):
        name = KEY_VARIABLE
    if settings["target_ca"] and settings["target_insecure"]:
        raise UsageProblem("--target-ca and --target-insecure contradict each other; drop one of them")
    access = Access(name, settings["target_ca"], not settings["target_insecure"])
    access.headers(environ)
    access.tls()
    return access


def topology_of(named: Named, given: Topology | None) -> Topology:
    """The topology that the deployment is measured as: the file's, checked against the roles, or one made of them.

    Without a file and without roles it is taken for one server, because nothing says otherwise.
    """
    if given is not None:
        for role in {*given.roles, *named.roles.values()}:
            want = given.roles[role].replicas if role in given.roles else 0
            if named.engines and named.count(role) != want:
                raise UsageProblem(
                    f"topology {given.name} has {want} {role.value}, --target-role names {named.count(role)}"
                )
        return given
    prefill, decode, servers = (named.count(role) for role in (Role.PREFILL, Role.DECODE, Role.SERVER))
    if prefill:
        return Topology(
            name=f"attached-{prefill}p{decode}d",
            kind=Kind.PD,
            roles={Role.PREFILL: RoleSpec(replicas=prefill), Role.DECODE: RoleSpec(replicas=decode)},
            kv_transfer=KvTransfer(),
        )
    name = f"attached-{servers}x" if servers else "attached"
    return Topology(name=name, kind=Kind.AGGREGATED, roles={Role.SERVER: RoleSpec(replicas=max(1, servers))})
