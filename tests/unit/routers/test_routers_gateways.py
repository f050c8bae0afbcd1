"""sglang-router's and smg's command lines, which program is really which, and what their readiness says."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from pytest_pdperf.engines.base import Instance, Ports, Programs
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.routers.base import Router, RouterInstance
from pytest_pdperf.routers.flags import switches
from pytest_pdperf.routers.registry import get_router
from pytest_pdperf.routers.sglang_router import ROUTER as SGLANG
from pytest_pdperf.routers.smg import ROUTER as SMG
from pytest_pdperf.routers.smg import start_of
from pytest_pdperf.spec.topology import FlagValue, Kind
from tests.unit.routers.router_instances import router as router_of

NOWHERE = Programs(())
router = partial(router_of, prefill=2, decode=1)
BOTH = pytest.mark.parametrize("product", [SGLANG, SMG], ids=lambda r: r.name)
COMMON = [
    ("--host", "127.0.0.1"),
    ("--port", "8000"),
    ("--policy", "round_robin"),
    ("--prometheus-host", "127.0.0.1"),
    ("--prometheus-port", "9100"),
    ("--worker-startup-check-interval", "1"),
    ("--health-check-interval-secs", "10"),
    ("--health-success-threshold", "1"),
    ("--disable-retries",),
    ("--shutdown-grace-period-secs", "1"),
]


def pairs(argv: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Each flag with its values."""
    out: list[list[str]] = [[]]
    for part in argv:
        if part.startswith("--"):
            out.append([part])
        else:
            out[-1].append(part)
    return [tuple(p) for p in out[1:]]


def test_sglang_router_gets_both_roles_and_the_bootstrap_ports() -> None:
    command = SGLANG.command(router(), NOWHERE)
    assert command.argv[:2] == ("sglang-router", "launch")
    assert command.env == {"RUST_LOG": "info"}
    assert pairs(command.argv) == [
        *COMMON,
        ("--pd-disaggregation",),
        ("--prefill", "http://127.0.0.1:8200", "8998"),
        ("--prefill", "http://127.0.0.1:8201", "8999"),
        ("--decode", "http://127.0.0.1:8210"),
    ]


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_smg_is_started_empty_by_the_helper_that_registers_the_workers(connector: str) -> None:
    argv = SMG.command(router(connector=connector), NOWHERE).argv
    cut = argv.index("--")
    assert argv[:3] == (sys.executable, "-m", "pytest_pdperf.routers.smg_register")
    assert pairs(argv[3:cut]) == [
        ("--router", "http://127.0.0.1:8000"),
        ("--connector", connector),
        ("--prefill", "http://127.0.0.1:8200", "8998"),
        ("--prefill", "http://127.0.0.1:8201", "8999"),
        ("--decode", "http://127.0.0.1:8210"),
    ]
    assert argv[cut + 1 : cut + 3] == ("smg", "launch")
    assert pairs(argv[cut + 3 :]) == [*COMMON, ("--disable-tokenizer-autoload",), ("--pd-disaggregation",)]


def test_smg_refuses_a_connector_whose_legs_it_would_send_at_once() -> None:
    with pytest.raises(UsageProblem, match=r"'smg'.*'example'.*vllm_router.*nixl, mooncake"):
        SMG.command(router(connector="example"), NOWHERE)


@BOTH
def test_aggregated_servers_go_on_the_command_line(product: Router) -> None:
    command = product.command(router(Kind.AGGREGATED), NOWHERE)
    flags = pairs(command.argv)
    assert flags[-1] == ("--worker-urls", "http://127.0.0.1:8200", "http://127.0.0.1:8201")
    assert not any("prefill" in flag[0] or "pd" in flag[0] for flag in flags)
    assert "pytest_pdperf.routers.smg_register" not in command.argv


@BOTH
def test_args_of_the_topology_win_over_defaults(product: Router) -> None:
    args: dict[str, FlagValue] = {
        "disable-retries": False,
        "health_check_interval_secs": 60,
        "prefill_policy": "power_of_two",
        "request_id_headers": ["a", "b"],
        "log_dir": None,
        "dp_aware": True,
    }
    flags = pairs(product.command(router(args=args), NOWHERE).argv)
    assert ("--health-check-interval-secs", "60") in flags
    assert ("--prefill-policy", "power_of_two") in flags
    assert ("--request-id-headers", "a", "b") in flags
    assert ("--dp-aware",) in flags
    assert not [flag for flag in flags if flag[0] in ("--disable-retries", "--log-dir")]
    assert len([flag for flag in flags if flag[0] == "--health-check-interval-secs"]) == 1


@BOTH
@pytest.mark.parametrize("key", ["port", "pd-disaggregation", "prometheus_port", "worker_urls", "mini_lb"])
def test_flags_of_the_launcher_are_refused(product: Router, key: str) -> None:
    name = key.replace("-", "_")
    with pytest.raises(UsageProblem, match=rf"router.args.{name} is decided by the launcher"):
        product.command(router(args={key: 1}), NOWHERE)


def test_a_prefill_engine_without_a_bootstrap_port_says_none() -> None:
    lone = router(prefill=1)
    bare = [
        Instance(**{f: getattr(w, f) for f in w.__slots__} | {"ports": Ports(http=1)}) for w in lone.workers
    ]
    argv = SGLANG.command(
        RouterInstance(lone.spec, lone.kind, 8000, 9100, bare, lone.kv_transfer), NOWHERE
    ).argv
    assert ("--prefill", "http://127.0.0.1:1", "none") in pairs(argv)


@BOTH
@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ({"status": "ready", "healthy_workers": 3, "total_workers": 3}, True),
        ({"status": "ready", "healthy_workers": 2, "total_workers": 2}, False),
        ({"status": "ready", "healthy_workers": 2, "total_workers": 3}, False),
        ({"status": "ready", "healthy_workers": 3, "total_workers": 4}, False),
        ({"status": "ready"}, False),
        ({"status": "not ready", "reason": "insufficient healthy workers"}, False),
        ({}, False),
    ],
)
def test_ready_is_every_worker_and_not_the_word(product: Router, body: dict[str, object], seen: bool) -> None:
    assert product.ready_path(router()) == "/readiness"
    assert product.sees_all_workers(router(), body) is seen


@BOTH
def test_the_program_is_looked_up_and_its_absence_says_what_to_install(product: Router) -> None:
    with pytest.raises(UsageProblem, match=r"pytest-pdperf\[routers\]"):
        product.check(NOWHERE)


@BOTH
def test_token_ids_go_to_generate_only(product: Router) -> None:
    assert product.supported_prompts() == {"generate_ids", "text"}


@pytest.mark.parametrize(
    ("name", "want"), [("sglang-router", SGLANG), ("sglang_router", SGLANG), ("smg", SMG)]
)
def test_routers_answer_to_their_names(name: str, want: Router) -> None:
    assert get_router(name) is want


class Environment:
    """A folder that looks like a virtual environment with routers in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bin").mkdir(parents=True)
        self.site = root / "lib/python3.12/site-packages"
        self.site.mkdir(parents=True)
        (root / "bin/python3").write_text("")
        self.programs = Programs((root / "bin",))

    def script(self, name: str, module: str) -> Path:
        path = self.root / "bin" / name
        path.write_text(
            f"#!{self.root}/bin/python3\nimport sys\nfrom {module}.cli import main\nsys.exit(main())\n"
        )
        return path

    def package(self, name: str, version: str) -> None:
        (self.site / name).mkdir()
        (self.site / name / "__main__.py").write_text("")
        (self.site / f"{name}-{version}.dist-info").mkdir()


def test_smg_is_its_own_program(tmp_path: Path) -> None:
    env = Environment(tmp_path)
    path = env.script("smg", "smg")
    env.package("smg", "1.13.0")
    assert start_of(env.programs) == (str(path),)
    assert SMG.version(env.programs) == "1.13.0"
    SMG.check(env.programs)


def test_sglang_routers_script_of_the_same_name_is_not_smg(tmp_path: Path) -> None:
    env = Environment(tmp_path)
    env.script("smg", "sglang_router")
    env.package("sglang_router", "0.3.2")
    assert start_of(env.programs) is None
    assert SMG.version(env.programs) == "unknown"
    with pytest.raises(UsageProblem, match="router 'smg'"):
        SMG.check(env.programs)
    env.package("smg", "1.13.0")
    assert start_of(env.programs) == (f"{tmp_path}/bin/python3", "-m", "smg")
    assert SMG.version(env.programs) == "1.13.0"


def test_an_impostor_ahead_on_the_search_path_does_not_hide_smg(tmp_path: Path) -> None:
    first, second = Environment(tmp_path / "a"), Environment(tmp_path / "b")
    first.script("smg", "sglang_router")
    path = second.script("smg", "smg")
    assert start_of(Programs((*first.programs.search, *second.programs.search))) == (str(path),)


def test_sglang_router_is_found_with_its_version(tmp_path: Path) -> None:
    env = Environment(tmp_path)
    path = env.script("sglang-router", "sglang_router")
    env.package("sglang_router", "0.3.2")
    SGLANG.check(env.programs)
    assert SGLANG.command(router(), env.programs).argv[0] == str(path)
    assert SGLANG.version(env.programs) == "0.3.2"
    assert SGLANG.version(NOWHERE) == "unknown"


@pytest.mark.parametrize(
    ("args", "want"),
    [
        ({"a_b": True}, ["--a-b"]),
        ({"a": False, "b": None}, []),
        ({"a": 0}, ["--a", "0"]),
        ({"a": [1, "x"]}, ["--a", "1", "x"]),
    ],
)
def test_switches(args: dict[str, FlagValue], want: list[str]) -> None:
    assert switches(args) == want
