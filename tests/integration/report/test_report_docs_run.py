"""Every command that the documentation shows runs, in a repository as `pdperf init` leaves it: nothing is rewritten but
absolute paths, which get this folder in front, and nothing is measured, because `--plan` is added.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import shutil
import stat
from pathlib import Path

import pytest

import pytest_pdperf
from pytest_pdperf.cli import main
from tests.integration.plugin_runs import QWEN3_32B, SPARED
from tests.integration.report.doc_examples import DOCS, README, ROOT, blocks, commands
from tests.unit.report.report_data import cell_of, closed_loop, history_of, small_run, write_cell

EXCEPTIONS = {
    ("pytest", "--target"): "asks the deployment at that URL what it serves",
    ("pytest", "--k8s"): "asks a cluster's API for its pods",
    ("pdperf", "--clean"): "ends processes of this machine that dead runs left behind",
    ("pdperf", "--inventory"): "records the GPUs of a GPU node",
    ("pip", ""): "needs the network",
    ("python", "pip"): "needs the network",
}
"""(program, word in it) -> why such a command is only parsed: elsewhere the suite runs it against stand-ins."""
STATUS_OF_THE_NODE = "doctor"
"""This command's exit status says whether the node is fit, which the documentation does not promise."""

INVENTORY = ROOT / "tests" / "data" / "inventories" / "hgx-h200-8x.json"
EXCHANGE = ROOT / "tests" / "data" / "exchange"
PUBLISHED = ROOT / "baselines" / "published" / "h100-qwen3-32b.json"
PROGRAMS = ("vllm", "vllm-router", "sglang", "python3")
SLURM = {
    "srun": "slurm 23.11.4",
    "sinfo": "a|gpu*|gpu:h100:8|128|idle",
    "scontrol": "ClusterName             = alps",
    "sbatch": "sbatch: Job 99 to start at 2026-12-01T00:00:00 using 68 processors",
    "salloc": "",
}
"""What the programs of a cluster with one idle node of eight GPUs say."""


def exception(words: tuple[str, ...]) -> str:
    """Why a command is not run; empty for those that are."""
    return next((why for place, why in EXCEPTIONS.items() if needs(words, *place)), "")


def needs(words: tuple[str, ...], program: str, word: str) -> bool:
    """Whether this command is of that program and has that word or option."""
    return words[0] == program and word in ("", *(one.partition("=")[0] for one in words))


def runnable(*programs: str) -> list[object]:
    return [one for one in commands(*programs) if not exception(one.values[0])]


def script(path: Path, said: str) -> None:
    """A program that says this and ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{said}'\n")
    path.chmod(stat.S_IRWXU)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's repository with the shipped suite, the runs and files that the documentation names, and engines."""
    here = tmp_path_factory.mktemp("repository")
    assert main(["init", str(here)]) == 0
    for place in ("opt/engines/vllm", "opt/engines/new", "opt/engines/base", "home/vllm", "DIR"):
        for name in PROGRAMS:
            script(here / place / "bin" / name, "")
    for name, said in SLURM.items():
        script(here / "slurm" / "bin" / name, said)
    for model in ("Qwen/Qwen3-32B", "models/qwen3-32b", "models/qwen3-8b"):
        (here / model).mkdir(parents=True)
        (here / model / "config.json").write_text(json.dumps(QWEN3_32B))
    (here / "home" / "serving").mkdir()
    shutil.copy(INVENTORY, here / "node.json")
    for run in ("pdperf-results/20250304-021503-8c1f", "pdperf-results/RUN", "RUN", "OLD", "NEW"):
        small_run(here / run)
    whole = here / "pdperf-results" / "20260101-000000-abcd"
    write_cell(whole, "pd-1p2d", cell_of(concurrency=4), closed_loop(4, [50.0] * 8, tokens=256))
    shutil.copy(PUBLISHED, here / "table.json")
    for source, name in (
        ("sglang.jsonl", "result.jsonl"),
        ("aiperf_records.jsonl", "profile_export.jsonl"),
    ):
        shutil.copy(EXCHANGE / source, here / name)
    assert main(["export", str(whole), "--as", "vllm", "-o", str(here / "vllm-result.json")]) == 0
    history_of(here / "history", [100, 101, 99, 120], "pd-1p2d-tp2", "in4096-out128-c16")
    return here


@pytest.fixture
def inside(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That repository as the working directory of a shell with the workflows' variables."""
    monkeypatch.chdir(repository)
    monkeypatch.setenv("MODEL", "Qwen/Qwen3-32B")
    monkeypatch.setenv("ENGINE_ENV", "/opt/engines/vllm")
    monkeypatch.setenv("PATH", f"{repository / 'slurm' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return repository


def as_a_shell_gives_them(words: tuple[str, ...], here: Path) -> list[str]:
    """The words after expansion; what a workflow adds by condition is left out."""
    plain = [word for word in words if not word.startswith("${") and not word.endswith("}")]
    found = [os.path.expandvars(word).replace("~/", f"{here}/home/", 1) for word in plain]
    return [
        word.replace("/opt/", f"{here}/opt/", 1).replace("=/models/", f"={here}/models/") for word in found
    ]


def planned(pytester: pytest.Pytester, words: list[str]) -> pytest.RunResult:
    """The command with `--plan`, and where it wants GPUs, those of a recorded node with engines of empty programs."""
    given = {word.partition("=")[0] for word in words}
    added = [] if "--plan" in given else ["--plan"]
    if "--engine" not in given:
        added += [] if "--engine-env" in given else ["--engine-env=opt/engines/vllm"]
        added += [] if given & {"--gpu-inventory", "--launcher"} else ["--gpu-inventory=node.json"]
    return pytester.runpytest_inprocess(*words[1:], *added, "-p", "no:cacheprovider", *SPARED)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """The package's modules, which each run inside this process would import again."""
    for module in pkgutil.walk_packages(pytest_pdperf.__path__, "pytest_pdperf."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


@pytest.mark.parametrize("words", runnable("pytest"))
def test_pytest_commands_are_planned(
    words: tuple[str, ...], inside: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inside)
    result = planned(pytester, as_a_shell_gives_them(words, inside))
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*nothing was started (--plan)*"])


@pytest.mark.parametrize("words", runnable("pdperf"))
def test_pdperf_commands_run(words: tuple[str, ...], inside: Path) -> None:
    if "raw" in words:
        pytest.importorskip("pyarrow", reason="pyarrow is missing: pip install 'pytest-pdperf[parquet]'")
    status = main(as_a_shell_gives_them(words, inside)[1:])
    assert status in ((0, 1) if words[1] == STATUS_OF_THE_NODE else (0,))


def test_a_command_that_cannot_be_is_noticed(
    inside: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inside)
    good = ["pytest", "tests/perf", "-m", "pd", "--gpus", "0-7", "--model", "Qwen/Qwen3-32B"]
    assert planned(pytester, good).ret == 0
    for bad in (["--topology", "pd-1p2d-tp2x"], ["--gpus", "0-8"], ["--workload", "quik"], ["-k", "nothing"]):
        assert planned(pytester, [*good, *bad]).ret != 0, bad


def test_every_exception_is_one_and_every_program_is_known() -> None:
    used = {
        place
        for place in EXCEPTIONS
        for one in commands("pytest", "pdperf", "pip", "python")
        if needs(one.values[0], *place)
    }
    assert used == set(EXCEPTIONS), "an exception that no command needs"
    page_lines = [line for block in blocks("bash", README) for line in str(block.values[1]).splitlines()]
    starts = {line.split()[0] for line in page_lines if line and not line.startswith((" ", "#"))}
    assert starts <= {"pytest", "pdperf", "pip", "source", "sbatch"}, "run it here, or say why not"


def test_the_documentation_names_its_exceptions() -> None:
    assert "`EXCEPTIONS`" in (DOCS / "index.md").read_text()
