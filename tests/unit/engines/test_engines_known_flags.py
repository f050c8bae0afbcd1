"""An engine too old or too new for a flag is refused before anything starts, by what is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_pdperf.engines.base import Engine, Instance, Ports, Programs
from pytest_pdperf.engines.registry import get_engine
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.topology import FlagValue, KvTransfer, Role, Topology

FILES = {
    "vllm": {
        "vllm/engine/arg_utils.py": """
            parser.add_argument("--served-model-name"); parser.add_argument("--kv-transfer-config", "-kvt")
            parser.add_argument("--max-num-seqs"); parser.add_argument("--compilation-config")
            class EngineArgs:
                enable_prefix_caching: bool
        """,
        "vllm/entrypoints/openai/cli_args.py": "host: str\nport: int\n",
        "vllm/distributed/kv_transfer/kv_connector/factory.py": 'register("NixlConnector")',
    },
    "sglang": {
        "sglang/srt/server_args.py": """
            "--model-path" "--served-model-name" "--host" "--port" "--nccl-port" "--enable-metrics" "--page-size"
            "--disaggregation-mode" "--disaggregation-transfer-backend" "--disaggregation-bootstrap-port"
            "--disable-radix-cache" "--max-running-requests"
        """
    },
}
VERSIONS = {"vllm": "0.20.1", "sglang": "0.5.3"}


def installed(name: str, folder: Path, *, without: str = "") -> Programs:
    """An environment with a program and the files that define its flags, less a word."""
    site = folder / "lib/python3.12/site-packages"
    (site / f"{name}-{VERSIONS[name]}.dist-info").mkdir(parents=True)
    for path, text in FILES[name].items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text.replace(without, "") if without else text)
    (folder / "bin").mkdir()
    program = folder / "bin" / name
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return Programs((folder / "bin",))


def instance(args: dict[str, FlagValue]) -> Instance:
    return Instance(
        id="prefill-0",
        role=Role.PREFILL,
        ports=Ports(http=1, side_channel=2, bootstrap=3, dist_init=4),
        devices=("0",),
        tensor_parallel=1,
        model="/m",
        served_model="m",
        args=args,
        env={},
        kv_transfer=KvTransfer(),
    )


ENGINES = pytest.mark.parametrize("name", sorted(FILES))


@ENGINES
@pytest.mark.parametrize("args", [{}, {"max_num_seqs": 4}, {"enable_prefix_caching": True}])
def test_what_is_installed_takes_what_it_knows(name: str, args: dict[str, FlagValue], tmp_path: Path) -> None:
    assert get_engine(name).command(instance(args), installed(name, tmp_path)).argv


def test_parts_of_a_mapping_and_negations_are_the_flags_they_belong_to(tmp_path: Path) -> None:
    args: dict[str, FlagValue] = {"compilation_config.mode": 3, "enable-prefix-caching": False}
    argv = get_engine("vllm").command(instance(args), installed("vllm", tmp_path)).argv
    assert "--compilation-config.mode" in argv and "--no-enable-prefix-caching" in argv


def refusal(engine: Engine, programs: Programs, args: dict[str, FlagValue]) -> str:
    with pytest.raises(UsageProblem) as caught:
        engine.command(instance(args), programs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "key", "hint", "help"),
    [
        ("vllm", "max_num_seq", "did you mean 'max_num_seqs'", "vllm serve --help=all"),
        ("sglang", "page-sizes", "did you mean 'page_size'", "sglang.launch_server --help"),
    ],
)
def test_a_flag_that_the_installed_version_lacks_is_named_with_that_version(
    name: str, key: str, hint: str, help: str, tmp_path: Path
) -> None:
    said = refusal(get_engine(name), installed(name, tmp_path), {key: 4})
    assert said.startswith(
        f"arguments of prefill-0: {key.replace('-', '_')}: {name} {VERSIONS[name]} has no flag"
    )
    assert hint in said and help in said


@pytest.mark.parametrize(
    ("name", "lost", "needed"),
    [
        ("vllm", "kv-transfer-config", "vllm 0.26 to 0.32"),
        ("sglang", "disaggregation-bootstrap-port", "sglang 0.5.17"),
    ],
)
def test_an_engine_without_a_flag_that_is_always_needed_is_told_with_the_versions_that_have_it(
    name: str, lost: str, needed: str, tmp_path: Path
) -> None:
    said = refusal(get_engine(name), installed(name, tmp_path, without=lost), {})
    assert said.startswith(
        f"{name} {VERSIONS[name]} has no flag --{lost}, which every command line for it needs"
    )
    assert needed in said


def test_a_connector_that_the_installed_version_lacks_is_refused_with_the_versions_that_have_it(
    tmp_path: Path,
) -> None:
    programs = installed("vllm", tmp_path)
    for connector, fine in (("nixl", True), ("mooncake", False)):
        topology = Topology.model_validate(
            {
                "name": "t",
                "kind": "pd",
                "roles": {"prefill": {}, "decode": {}},
                "kv_transfer": {"connector": connector},
            }
        )
        if fine:
            get_engine("vllm").check(programs, topology, ("0",))
            continue
        with pytest.raises(
            UsageProblem, match=r"vllm 0\.20\.1 has no MooncakeConnector.*vllm 0\.26 to 0\.32"
        ):
            get_engine("vllm").check(programs, topology, ("0",))


@ENGINES
def test_nothing_is_refused_where_the_sources_are_not_found(name: str, tmp_path: Path) -> None:
    programs = installed(name, tmp_path)
    for path in FILES[name]:
        (tmp_path / "lib/python3.12/site-packages" / path).unlink()
        break
    assert get_engine(name).command(instance({"never_heard_of": 1}), programs).argv
