"""vllm-router's command lines and what its readiness and its response ids say."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_pdperf.engines.base import Programs
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.routers.registry import ROUTERS, get_router
from pytest_pdperf.routers.vllm_router import ROUTER
from pytest_pdperf.spec.topology import FlagValue, Kind
from tests.unit.routers.router_instances import router

NOWHERE = Programs(())


def pairs(argv: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Each flag with its values."""
    out: list[list[str]] = []
    for part in argv[1:]:
        if part.startswith("--"):
            out.append([part])
        else:
            out[-1].append(part)
    return [tuple(p) for p in out]


def test_pd_over_nixl() -> None:
    command = ROUTER.command(router(), NOWHERE)
    assert command.argv[0] == "vllm-router"
    assert command.env == {"RUST_LOG": "info"}
    assert pairs(command.argv) == [
        ("--host", "127.0.0.1"),
        ("--port", "8000"),
        ("--policy", "round_robin"),
        ("--prometheus-host", "127.0.0.1"),
        ("--prometheus-port", "9100"),
        ("--worker-startup-check-interval", "1"),
        ("--disable-retries",),
        ("--vllm-pd-disaggregation",),
        ("--kv-connector", "nixl"),
        ("--prefill", "http://127.0.0.1:8200"),
        ("--decode", "http://127.0.0.1:8210"),
        ("--decode", "http://127.0.0.1:8211"),
    ]


def test_mooncake_names_the_bootstrap_port_after_each_prefill_url() -> None:
    flags = pairs(ROUTER.command(router(connector="mooncake", prefill=2), NOWHERE).argv)
    assert ("--kv-connector", "mooncake") in flags
    assert ("--prefill", "http://127.0.0.1:8200", "8998") in flags
    assert ("--prefill", "http://127.0.0.1:8201", "8999") in flags


def test_aggregated() -> None:
    flags = pairs(ROUTER.command(router(Kind.AGGREGATED), NOWHERE).argv)
    assert flags[-1] == ("--worker-urls", "http://127.0.0.1:8200", "http://127.0.0.1:8201")
    assert ("--disable-retries",) in flags
    assert not any("prefill" in f[0] or "pd" in f[0] for f in flags)


def test_args_of_the_topology_win_over_defaults() -> None:
    args: dict[str, FlagValue] = {
        "disable_retries": False,
        "worker-startup-check-interval": 3,
        "enable_igw": True,
        "request_id_headers": ["a", "b"],
        "log_dir": None,
    }
    flags = pairs(ROUTER.command(router(args=args), NOWHERE).argv)
    assert ("--worker-startup-check-interval", "3") in flags
    assert ("--enable-igw",) in flags
    assert ("--request-id-headers", "a", "b") in flags
    assert not any(f[0] in ("--disable-retries", "--log-dir") for f in flags)


@pytest.mark.parametrize("key", ["port", "kv-connector", "prometheus_port", "worker_urls"])
def test_flags_of_the_launcher_are_refused(key: str) -> None:
    with pytest.raises(
        UsageProblem, match=rf"router.args.{key.replace('-', '_')} is decided by the launcher"
    ):
        ROUTER.command(router(args={key: 1}), NOWHERE)


def counts(healthy: int, total: int) -> dict[str, object]:
    return {"healthy": healthy, "total": total}


@pytest.mark.parametrize(
    ("body", "ready"),
    [
        ({"status": "ready", "prefill": counts(1, 1), "decode": counts(2, 2)}, True),
        ({"status": "ready", "prefill": counts(1, 1), "decode": counts(1, 2)}, False),
        ({"status": "ready", "prefill": counts(1, 1), "decode": counts(1, 1)}, False),
        ({"status": "ready", "prefill": counts(0, 1), "decode": counts(2, 2)}, False),
        ({"status": "ready", "decode": counts(2, 2)}, False),
        ({"status": "ready", "healthy_workers": 3, "total_workers": 3}, False),
        ({"prefill": 1, "decode": 2}, False),
        ({}, False),
    ],
)
def test_every_worker_of_every_role_counts(body: dict[str, object], ready: bool) -> None:
    assert ROUTER.sees_all_workers(router(), body) is ready


@pytest.mark.parametrize(
    ("healthy", "total", "ready"), [(2, 2, True), (1, 2, False), (1, 1, False), (3, 3, False)]
)
def test_every_server_counts(healthy: int, total: int, ready: bool) -> None:
    body = {"status": "ready", "healthy_workers": healthy, "total_workers": total}
    assert ROUTER.sees_all_workers(router(Kind.AGGREGATED), body) is ready


@pytest.mark.parametrize("tail", ["", "-0", "-0-88097abe"])
def test_a_response_id_names_its_pair(tail: str) -> None:
    id = f"cmpl-___prefill_addr_127.0.0.1:22001___decode_addr_127.0.0.1:22003_b9fdc139d8944ac297fb02faba566991{tail}"
    assert ROUTER.pair_of(id) == ("127.0.0.1:22001", "127.0.0.1:22003")


@pytest.mark.parametrize("id", ["", "cmpl-bb0307f55dd82004", "chatcmpl-___prefill_addr_127.0.0.1:1"])
def test_other_ids_name_no_pair(id: str) -> None:
    assert ROUTER.pair_of(id) is None


def test_a_missing_program_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(
        UsageProblem, match=r"no program vllm-router in .*pytest-pdperf\[routers\].*--engine-env"
    ):
        ROUTER.check(Programs((tmp_path,)))


def test_program_and_version_come_from_the_same_environment(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm-router").write_text("")
    (tmp_path / "lib" / "python3.12" / "site-packages" / "vllm_router-0.1.17.dist-info").mkdir(parents=True)
    programs = Programs((tmp_path / "bin",))
    ROUTER.check(programs)
    assert ROUTER.version(programs) == "0.1.17"
    assert ROUTER.command(router(), programs).argv[0] == str(tmp_path / "bin" / "vllm-router")
    assert ROUTER.version(NOWHERE) == "unknown"


@pytest.mark.parametrize("name", ["vllm_router", "vllm-router"])
def test_both_spellings_name_the_router(name: str) -> None:
    assert get_router(name) is ROUTER


def test_an_unknown_router_names_the_nearest() -> None:
    with pytest.raises(UsageProblem, match="'vlm-router' is not known; did you mean 'vllm_router'"):
        get_router("vlm-router")


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_every_registered_router_answers_to_its_name(name: str) -> None:
    assert get_router(name).name == name
