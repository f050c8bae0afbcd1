"""Manifests hold what the topology says, and pods made of them are found again as the roles they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from pytest_pdperf.cli import main
from pytest_pdperf.places.pods import hardware_of, pods_of
from pytest_pdperf.spec.loader import find_topologies, shipped_fixtures

ALWAYS = ["--model", "Qwen/Qwen3-32B", "--image", "engine:1"]
GPUSTACK = ["--flavour", "gpustack", "--accelerator", "h100"]


def rendered(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[dict[str, Any]], str]:
    assert main(["manifests", *arguments, *ALWAYS]) == 0
    text = capsys.readouterr().out
    assert "&id" not in text, "no anchors"
    return list(yaml.safe_load_all(text)), text


def container(document: dict[str, Any]) -> dict[str, Any]:
    (found,) = document["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def value(args: list[str], flag: str) -> str:
    return args[args.index(flag) + 1]


def test_llm_d_gets_the_launchers_command_lines_and_its_own_labels(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (topology,) = find_topologies(["pd-1p2d-tp2"], [shipped_fixtures()])
    (prefill, decode), text = rendered(capsys, "pd-1p2d-tp2")
    assert [d["metadata"]["name"] for d in (prefill, decode)] == ["pd-1p2d-tp2-prefill", "pd-1p2d-tp2-decode"]
    assert [d["spec"]["replicas"] for d in (prefill, decode)] == [1, 2]
    for document, role in ((prefill, "producer"), (decode, "consumer")):
        labels = document["spec"]["template"]["metadata"]["labels"]
        assert document["spec"]["selector"]["matchLabels"].items() <= labels.items()
        args = container(document)["args"]
        assert value(args, "--max-model-len") == str(topology.engine_args["max_model_len"])
        assert value(args, "--tensor-parallel-size") == "2"
        assert json.loads(value(args, "--kv-transfer-config"))["kv_role"] == f"kv_{role}"
        env = {row["name"]: row for row in container(document)["env"]}
        assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        assert not env.keys() & {"CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE"}
    (proxy,) = decode["spec"]["template"]["spec"]["initContainers"]
    assert f"--model-server-port={value(container(decode)['args'], '--port')}" in proxy["args"]
    assert "initContainers" not in prefill["spec"]["template"]["spec"]
    assert "# the router is llm-d's own chart" in text


def test_pods_of_the_manifests_are_found_with_port_and_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    documents, _ = rendered(capsys, "pd-1p2d-tp2")
    for document in documents:
        template = document["spec"]["template"]
        item = {
            "metadata": {"name": "pod", "uid": "u", **template["metadata"]},
            "spec": {**template["spec"], "nodeName": "n"},
            "status": {"phase": "Running"},
        }
        (pod,) = pods_of(template["metadata"]["labels"]["llm-d.ai/role"], [item], None)
        assert (pod.container, str(pod.port)) == ("modelserver", value(container(document)["args"], "--port"))
        assert hardware_of([pod], {"n": "H100"}, "ns") == "2x H100"


def test_aggregated_servers_need_no_proxy_and_no_kv_port(capsys: pytest.CaptureFixture[str]) -> None:
    (servers,), _ = rendered(capsys, "aggregated-3x-tp2", "--name", "agg")
    assert (servers["metadata"]["name"], servers["spec"]["replicas"]) == ("agg-server", 3)
    assert "initContainers" not in servers["spec"]["template"]["spec"]
    assert [port["name"] for port in container(servers)["ports"]] == ["http"]
    assert "--kv-transfer-config" not in container(servers)["args"]


def test_gpustack_gets_roles_and_only_the_flags_that_are_the_topologys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (document,), text = rendered(capsys, "pd-1p2d-tp2", *GPUSTACK)
    assert document["kind"] == "ModelDeployment"
    roles = document["spec"]["roles"]
    assert [(r["kind"], r["replicas"], r["resources"]["accelerator"]) for r in roles] == [
        ("Prefill", 1, 2),
        ("Decode", 2, 2),
    ]
    assert value(roles[0]["extraArgs"], "--max-num-seqs") == "64"
    operators = {
        "--port",
        "--host",
        "--kv-transfer-config",
        "--served-model-name",
        "0.0.0.0",
        "Qwen/Qwen3-32B",
    }
    assert not operators & {*roles[0]["extraArgs"], *roles[1]["extraArgs"]}
    assert document["spec"]["kvTransfer"] == {"protocol": "Auto"}
    assert "kv_transfer.connector nixl: the operator chooses the connector itself" in text
    (servers,), _ = rendered(capsys, "aggregated-3x-tp2", *GPUSTACK)
    assert [role["kind"] for role in servers["spec"]["roles"]] == ["Server"]
    assert "kvTransfer" not in servers["spec"]


def test_sglang_keeps_its_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    (document,), _ = rendered(capsys, "pd-1p2d-tp2", *GPUSTACK, "--engine", "sglang")
    args = document["spec"]["roles"][0]["extraArgs"]
    assert document["spec"]["engine"]["name"] == "SGLang"
    assert "--disable-radix-cache" in args
    refused = ("--disaggregation", "--model-path", "--nccl-port")
    assert not [word for word in args if word.startswith(refused)]
    (servers,), _ = rendered(capsys, "aggregated-3x-tp2", "--engine", "sglang")
    assert container(servers)["command"] == ["sglang", "serve"]
    assert value(container(servers)["args"], "--nccl-port") == "29500", "a port, not 0"


BAD = {
    "topology": (["pd-1p2d-tp3"], "did you mean"),
    "simulated": (["pd-1p2d", "--engine", "sim"], "simulated engines are not deployed"),
    "name": (["pd-1p2d", "--name", "Not_a_name"], "want lower-case letters"),
    "connector": (["pd-1p1d-mooncake-tcp"], "choose --flavour gpustack"),
    "accelerator": (["pd-1p2d", "--flavour", "gpustack"], "--accelerator is missing"),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD)
def test_bad_input_ends_with_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["manifests", *arguments, *ALWAYS]) == 2
    assert words in capsys.readouterr().err
