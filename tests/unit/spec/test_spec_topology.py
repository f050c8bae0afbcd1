"""Topology files: what they mean, and errors that are enough to mend the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

import pytest_pdperf
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.loader import (
    available,
    find_topologies,
    find_workload,
    load_topology,
    shipped_fixtures,
)
from pytest_pdperf.spec.topology import Kind, KvTransfer, Role, Topology

PD = "kind: pd\nroles:\n  prefill: {replicas: 1, tensor_parallel: 2}\n  decode: {replicas: 2}\n"
SHIPPED = [shipped_fixtures()]


def load(tmp_path: Path, text: str, name: str = "mine") -> Topology:
    path = tmp_path / f"{name}.yaml"
    path.write_text(text)
    return load_topology(path)


def test_a_whole_file(tmp_path: Path) -> None:
    text = PD + (
        "kv_transfer: {connector: mooncake, transport: tcp}\n"
        "router: {name: smg, policy: random, port: 8000, args: {log_level: warn}, env: {RUST_LOG: warn}}\n"
        "engine: vllm\n"
        "engine_args: {max_model_len: 16384, gpu_memory_utilization: 0.90, enforce_eager: true, seed: null,\n"
        "  compilation_config: {level: 3, sizes: [1, 2]}, served: [a, b]}\n"
        "env: {UCX_TLS: tcp, VLLM_X: 1}\n"
        "placement: {prefill-0: [1, 0], decode-1: [3]}\n"
    )
    topology = load(tmp_path, text)
    assert topology.name == "mine"
    assert topology.kind is Kind.PD
    assert topology.gpus == 4
    assert [i[0] for i in topology.instances] == ["prefill-0", "decode-0", "decode-1"]
    assert topology.kv_transfer == KvTransfer(connector="mooncake", transport="tcp")
    assert topology.router.port == 8000
    assert topology.engine_args == {
        "max_model_len": 16384,
        "gpu_memory_utilization": 0.9,
        "enforce_eager": True,
        "seed": None,
        "compilation_config": {"level": 3, "sizes": [1, 2]},
        "served": ["a", "b"],
    }
    assert topology.env == {"UCX_TLS": "tcp", "VLLM_X": "1"}
    assert topology.placement == {"prefill-0": [1, 0], "decode-1": [3]}


def test_defaults_and_freezing(tmp_path: Path) -> None:
    topology = load(tmp_path, PD)
    assert topology.kv_transfer == KvTransfer(connector="nixl", transport="auto")
    assert topology.engine is None
    assert topology.roles[Role.DECODE].tensor_parallel == 1
    with pytest.raises(ValidationError):
        topology.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (
            "kind: pdd\nroles: {}",
            ["mine.yaml:1: kind: 'pdd' is not known; did you mean 'pd'? Known: pd, aggregated"],
        ),
        (
            "kind: pd\nroles:\n  prefil: {}\n  decode: {}",
            ["mine.yaml:3: roles.prefil: 'prefil' is not known; did you mean 'prefill'?"],
        ),
        (
            PD + "kv_transfer:\n  connector: nixxl\n  transprt: tcp",
            [
                "mine.yaml:6: kv_transfer.connector: 'nixxl' is not known; did you mean 'nixl'?",
                "mine.yaml:7: kv_transfer.transprt: unknown key; did you mean 'transport'?",
            ],
        ),
        (
            PD + "kv_transfer: {connector: example, transport: tcp}",
            [
                "kv_transfer.transport: connector 'example' leaves KV in files of a folder, so 'tcp' means nothing"
            ],
        ),
        (PD + "enigne: vllm", ["mine.yaml:5: enigne: unknown key; did you mean 'engine'?"]),
        (PD + "router: {prot: 1}", ["router.prot: unknown key; did you mean 'port'?"]),
        (
            "kind: pd\nroles: {prefill: {replica: 1}, decode: {}}",
            ["roles.prefill.replica: unknown key; did you mean 'replicas'?"],
        ),
        (PD + "name: x", ["mine.yaml:5: name: a topology is named by its file"]),
        ("roles: {server: {}}", ["mine.yaml:1: kind: this key is missing"]),
        ("kind: pd\nroles:", ["mine.yaml:2: roles: must be a mapping, got nothing"]),
        ("kind: pd\nroles: [prefill]", ["roles: must be a mapping, got ['prefill']"]),
        ("kind: pd\nroles: {prefill: 3, decode: {}}", ["roles.prefill: must be a mapping, got 3"]),
        ("kind: pd\nroles: {}", ["roles: kind 'pd' needs exactly the roles decode, prefill, got none"]),
        (
            "kind: aggregated\nroles: {prefill: {}, decode: {}}",
            ["mine.yaml:2: roles: kind 'aggregated' needs exactly the roles server, got decode, prefill"],
        ),
        (
            "kind: aggregated\nroles: {server: {}}\nkv_transfer: {connector: nixl}",
            ["mine.yaml:3: kv_transfer: belongs to kind 'pd' only"],
        ),
        (
            "kind: pd\nroles: {prefill: {replicas: true}, decode: {replicas: '2'}}",
            [
                "prefill.replicas: must be a whole number, got true",
                "decode.replicas: must be a whole number, got '2'",
            ],
        ),
        (
            "kind: pd\nroles: {prefill: {replicas: 0}, decode: {replicas: 1.5}}",
            [
                "prefill.replicas: must be at least 1, got 0",
                "decode.replicas: must be a whole number, got 1.5",
            ],
        ),
        (
            "kind: pd\nroles: {prefill: {replicas: 1000000}, decode: {tensor_parallel: -2}}",
            ["must be at most 1024, got 1000000", "decode.tensor_parallel: must be at least 1, got -2"],
        ),
        (PD + "router: {port: 65536}", ["router.port: must be at most 65535, got 65536"]),
        (
            PD + "engine_args:\n  --max-len: 5",
            ["mine.yaml:5: engine_args: write the flag '--max-len' without"],
        ),
        (PD + "engine_args: {'a b': 5}", ["'a b' is not a flag name"]),
        (
            PD + "engine_args: {a: [1, [2]]}",
            ["engine_args.a.1: must be text, a whole number, a number or true"],
        ),
        (PD + "env: {'A=B': 5}", ["'A=B' is not a name for an environment variable"]),
        (PD + "env: {A: [1]}", ["env.A: must be text, got [1]"]),
        (PD + "env:\n  A:\n", ["mine.yaml:6: env.A: must be text, got nothing"]),
        (
            PD + "placement:\n  prefil-0: [0, 1]",
            [
                "mine.yaml:6: placement.prefil-0: no such instance; this topology has prefill-0, decode-0, decode-1"
            ],
        ),
        (
            PD + "placement: {prefill-0: [0]}",
            ["placement.prefill-0: needs 2 positions in the --gpus list, got 1"],
        ),
        (PD + "placement: {decode-0: [-1]}", ["placement.decode-0: positions in the --gpus list start at 0"]),
        (PD + "placement: {prefill-0: [0, 1], decode-0: [1]}", ["placement: position 1 is used twice"]),
        (PD + "placement: {decode-0: [a]}", ["placement.decode-0.0: must be a whole number, got 'a'"]),
    ],
)
def test_errors_name_line_key_value_and_way_out(tmp_path: Path, text: str, messages: list[str]) -> None:
    with pytest.raises(UsageProblem) as caught:
        load(tmp_path, text)
    for message in messages:
        assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == len(messages), str(caught.value)


def test_many_errors_are_cut(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem) as caught:
        load(tmp_path, PD + "".join(f"wrong{i}: 1\n" for i in range(9)))
    lines = str(caught.value).splitlines()
    assert len(lines) == 6
    assert lines[-1] == "... and 4 more"


@pytest.mark.parametrize("name", ["a b", "..", "-x", "x[1]"])
def test_file_names_become_test_ids(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageProblem, match="part of test ids"):
        load(tmp_path, PD, name)


SIZES = {
    "pd-1p2d": (Kind.PD, 3, ("prefill-0", "decode-0", "decode-1")),
    "aggregated-3x": (Kind.AGGREGATED, 3, ("server-0", "server-1", "server-2")),
    "pd-1p1d": (Kind.PD, 2, ("prefill-0", "decode-0")),
    "aggregated-2x": (Kind.AGGREGATED, 2, ("server-0", "server-1")),
    "pd-1p2d-tp2": (Kind.PD, 6, ("prefill-0", "decode-0", "decode-1")),
    "aggregated-3x-tp2": (Kind.AGGREGATED, 6, ("server-0", "server-1", "server-2")),
    "pd-1p2d-tp2-tcp": (Kind.PD, 6, ("prefill-0", "decode-0", "decode-1")),
    "pd-1p1d-mooncake-tcp": (Kind.PD, 2, ("prefill-0", "decode-0")),
    "pd-1p1d-example": (Kind.PD, 2, ("prefill-0", "decode-0")),
    "pd-1p1d-tp2-tp1": (Kind.PD, 3, ("prefill-0", "decode-0")),
    "first-measurement": (Kind.PD, 8, ("prefill-0", "decode-0")),
    "first-measurement-aggregated": (Kind.AGGREGATED, 8, ("server-0", "server-1")),
}


def test_what_ships() -> None:
    names = available("topologies", SHIPPED)
    assert set(names) >= set(SIZES)
    assert len(find_topologies(names, SHIPPED)) == len(names), "every file loads"
    for topology in find_topologies(list(SIZES), SHIPPED):
        ids = tuple(instance for instance, _, _ in topology.instances)
        assert (topology.kind, topology.gpus, ids) == SIZES[topology.name]


def test_published_limits_are_the_same_on_both_sides() -> None:
    limits = {"max_model_len": 16384, "max_num_seqs": 64, "gpu_memory_utilization": 0.9}
    names = ["pd-1p2d-tp2", "aggregated-3x-tp2", "pd-1p2d-tp2-tcp"]
    assert all(topology.engine_args == limits for topology in find_topologies(names, SHIPPED))


def test_the_first_measurement_is_sglang_on_two_numa_nodes() -> None:
    first, control = find_topologies(["first-measurement", "first-measurement-aggregated"], SHIPPED)
    assert first.engine == control.engine == "sglang"
    assert first.router.port == control.router.port == 8000
    assert first.placement == {"prefill-0": [0, 1, 2, 3], "decode-0": [4, 5, 6, 7]}
    assert first.kv_transfer == KvTransfer(connector="nixl")
    assert {spec.tensor_parallel for spec in first.roles.values()} == {4}


def test_finding_by_name_and_path(tmp_path: Path) -> None:
    mine = tmp_path / "topologies"
    mine.mkdir()
    (mine / "pd-1p1d.yml").write_text(PD)
    own, shipped = find_topologies(["pd-1p1d", "pd-1p2d"], [tmp_path, *SHIPPED])
    assert own.gpus == 4, "the first folder wins"
    assert shipped.gpus == 3
    (by_path,) = find_topologies([str(mine / "pd-1p1d.yml")], [])
    assert by_path == own
    assert "pd-1p1d" in available("topologies", [tmp_path])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["pd-1p2d-tp"], "unknown topology 'pd-1p2d-tp'; did you mean 'pd-1p2d-tp2'?"),
        (["pd-1p2d", "pd-1p2d"], "topology 'pd-1p2d' is asked for twice"),
        (["../topologies/pd-1p2d"], "unknown topology"),
        ([""], "unknown topology ''"),
        (["missing/x.yaml"], "no topology file 'missing/x.yaml'"),
    ],
)
def test_names_that_do_not_work(names: list[str], message: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        find_topologies(names, SHIPPED)
    assert message in str(caught.value)


def test_an_installed_package_ships_its_own_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pytest_pdperf"
    package.mkdir()
    (tmp_path / "fixtures" / "topologies").mkdir(parents=True)
    monkeypatch.setattr(pytest_pdperf, "__file__", str(package / "__init__.py"))
    assert shipped_fixtures() == package / "_fixtures", "a neighbour called fixtures is not ours"
    (tmp_path / "pyproject.toml").touch()
    assert shipped_fixtures() == tmp_path / "fixtures"


def test_a_misspelt_path_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(PD)
    (tmp_path / "mine.txt").touch()
    with pytest.raises(
        UsageProblem, match=r"no topology file '.*mien\.yaml'; did you mean '.*mine\.yaml'\?"
    ) as caught:
        find_topologies([str(tmp_path / "mien.yaml")], [])
    assert "mine.txt" not in str(caught.value)


def test_unknown_workload_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match=r"unknown workload 'quik'; did you mean 'quick'\?"):
        find_workload("quik", SHIPPED)
    with pytest.raises(UsageProblem, match=r"unknown workload 'x'; none found in .*workloads"):
        find_workload("x", [tmp_path])
