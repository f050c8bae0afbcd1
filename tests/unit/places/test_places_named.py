"""What is said about a deployment is checked as text before anybody is asked anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.options import Settings, resolve
from pytest_pdperf.places.named import Named, base_url, read_named, topology_of, without_target
from pytest_pdperf.spec.topology import Kind, Role, RoleSpec, Topology

CA = Path(__file__).parents[2] / "data" / "tls" / "ca.pem"
KEY = "not-to-be-seen-4711"


def settings(**given: Any) -> Settings:
    return resolve({f"pdperf_{name}": value for name, value in given.items()}.get, lambda name: None)


def named(*roles: str, environ: dict[str, str] | None = None, **more: Any) -> Named:
    return read_named(settings(target="http://front:8000", target_role=list(roles), **more), environ or {})


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/", "http://h:8000"),
        ("https://h/v1", "https://h"),
        ("https://h/openai/v1/chat/completions", "https://h/openai"),
        ("http://[::1]:8000/v1/", "http://[::1]:8000"),
    ],
)
def test_a_base_url_ends_before_the_api(text: str, url: str) -> None:
    assert base_url(text, "--target") == url


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("front:8000", "want http://HOST:PORT"),
        ("http://", "want http://HOST:PORT"),
        ("ftp://h", "want http://HOST:PORT"),
        ("http://h:99999", "ort out of range"),
        ("http://h:0", "want http://HOST:PORT"),
        ("http://h/?key=1", "no query"),
        (f"https://me:{KEY}@h", "credentials do not belong into a URL"),
    ],
)
def test_what_is_no_base_url_is_refused_without_repeating_a_password(text: str, why: str) -> None:
    with pytest.raises(UsageProblem) as problem:
        base_url(text, "--target")
    assert why in str(problem.value)
    assert KEY not in str(problem.value)


def test_replicas_are_numbered_in_the_order_given_and_the_router_is_none_of_them() -> None:
    found = named(
        "decode=http://d0:1", "prefill=http://p:1", "decode=http://d1:1/metrics", "router=http://r:1"
    )
    assert found.urls == {
        "decode-0": "http://d0:1",
        "prefill-0": "http://p:1",
        "decode-1": "http://d1:1/metrics",
    }
    assert found.routers == ("http://r:1",)
    assert found.count(Role.DECODE) == 2


ROLES = {
    "unknown role": (["decoder=http://d:1"], "want ROLE=URL with a role of prefill, decode, server, router"),
    "no url": (["decode"], "want ROLE=URL"),
    "twice": (["server=http://a:1", "server=http://a:1/"], "named twice"),
    "the target": (["prefill=http://front:8000", "decode=http://d:1"], "this is the target itself"),
    "half a pair": (["decode=http://d:1"], "no prefill engine is named"),
    "both kinds": (["server=http://a:1", "decode=http://d:1"], "not both"),
}


@pytest.mark.parametrize(("roles", "why"), ROLES.values(), ids=ROLES)
def test_roles_that_make_no_deployment(roles: list[str], why: str) -> None:
    with pytest.raises(UsageProblem) as problem:
        named(*roles)
    assert why in str(problem.value)


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "gpus": ({"gpus": "0-7"}, "--gpus is about engines to bring up"),
    "reference": ({"reference": "/opt"}, "--reference is about engines to bring up"),
    "engine arguments": ({"engine_arg": ["a=1"]}, "--engine-arg is about engines to bring up"),
    "faults": ({"sim_fault": ["leak=1"]}, "--sim-fault is about engines to bring up"),
    "launches": ({"launches": "3"}, "is one launch however often it is measured"),
    "certificates without TLS": ({"target_insecure": True}, "no URL of this run is https://"),
    "unset key": ({"target_api_key_env": "NOWHERE"}, "NOWHERE: this environment variable is not set"),
    "both": ({"target_insecure": True, "target_ca": str(CA)}, "contradict each other"),
    "no such file": ({"target_ca": "/nowhere.pem"}, "CA file /nowhere.pem: no such file"),
    "no certificate": ({"target_ca": __file__}, "no certificate in PEM form"),
}


@pytest.mark.parametrize(("more", "why"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_options_that_contradict_each_other(more: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageProblem) as problem:
        named(**more)
    assert why in str(problem.value)


def test_the_usual_variable_is_used_where_it_is_set_and_the_named_one_before_it() -> None:
    environ = {"PDPERF_API_KEY": "a", "MINE": "b"}
    assert named().access.key_env is None
    assert named(environ=environ).access.headers(environ) == {"Authorization": "Bearer a"}
    assert named(environ=environ, target_api_key_env="MINE").access.headers(environ) == {
        "Authorization": "Bearer b"
    }
    with pytest.raises(UsageProblem, match="not a valid header value"):
        named(environ={"PDPERF_API_KEY": "a\r\nX: y"})


def test_options_about_a_target_need_one() -> None:
    with pytest.raises(UsageProblem, match="--target-role does nothing without --target"):
        without_target(settings(engine="sim", target_role=["server=http://a:1"]))
    without_target(settings(engine="sim"))


def test_the_topology_is_made_of_the_roles_or_checked_against_them() -> None:
    pair = Topology(name="pair", kind=Kind.PD, roles={Role.PREFILL: RoleSpec(), Role.DECODE: RoleSpec()})
    roles = ("prefill=http://p:1", "decode=http://d0:1", "decode=http://d1:1")
    made = topology_of(named(*roles), None)
    assert (made.name, made.kind, [name for name, _, _ in made.instances]) == (
        "attached-1p2d",
        Kind.PD,
        ["prefill-0", "decode-0", "decode-1"],
    )
    assert topology_of(named("server=http://a:1", "server=http://b:1"), None).name == "attached-2x"
    alone = topology_of(named(), None)
    assert (alone.name, alone.kind) == ("attached", Kind.AGGREGATED)
    assert topology_of(named(), pair) is pair
    assert topology_of(named(*roles[:2]), pair) is pair
    with pytest.raises(UsageProblem, match="topology pair has 1 decode, --target-role names 2"):
        topology_of(named(*roles), pair)
    with pytest.raises(UsageProblem, match="names"):
        topology_of(named("server=http://a:1"), pair)
