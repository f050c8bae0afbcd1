"""What the documentation shows works: generated pages are current, commands parse, YAML loads, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_pdperf.cli import build_parser
from pytest_pdperf.gate.verdict import Verdict, VerdictRow
from pytest_pdperf.options import BY_NAME, OPTIONS, resolve
from pytest_pdperf.places.kubernetes import read_wanted
from pytest_pdperf.places.named import read_named
from pytest_pdperf.spec.loader import (
    available,
    load_tolerances,
    load_topology,
    load_workload,
    shipped_fixtures,
)
from tests.integration.report.doc_examples import BLOCK, DOCS, PAGES, README, ROOT, blocks, commands

PYTEST_FLAGS = {"-m", "-k", "--junitxml", "-n", "-q", "-v", "-x"}
FLAGS = {option.flag: option for option in OPTIONS}


def test_generated_pages_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(DOCS / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}run: python docs/generate.py"


def test_a_stale_page_is_noticed(tmp_path: Path) -> None:
    copy = tmp_path / "docs"
    (copy / "reference").mkdir(parents=True)
    (copy / "generate.py").write_text((DOCS / "generate.py").read_text())
    done = subprocess.run(
        [sys.executable, str(copy / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and "options.md is not current" in done.stdout


@pytest.mark.parametrize("words", commands("pdperf"))
def test_pdperf_commands_parse(words: tuple[str, ...]) -> None:
    build_parser().parse_args(words[1:])


@pytest.mark.parametrize("words", commands("pytest"))
def test_pytest_commands_use_options_that_exist_and_values_that_parse(words: tuple[str, ...]) -> None:
    given: dict[str, Any] = {}
    rest = [
        word for word in words[1:] if not word.startswith("${") and not word.endswith("}")
    ]  # what the workflow adds by condition
    position = 0
    while position < len(rest):
        word = rest[position]
        position += 1
        flag, _, value = word.partition("=")
        if flag in PYTEST_FLAGS:
            position += int(flag in ("-m", "-k", "--junitxml", "-n"))
            continue
        if not flag.startswith("-"):
            assert "::" in flag or (ROOT / flag).exists(), f"{flag}: no such path"
            continue
        assert flag in FLAGS, f"{flag} is no option of the suite"
        option = FLAGS[flag]
        bare = position >= len(rest) or rest[position].startswith("-")
        if option.kind == "flag" or (option.kind == "optional" and bare and not value):
            given[option.dest] = option.const if option.kind == "optional" else True
            continue
        if not value:
            assert not rest[position].startswith(("/", "$E")), (
                f"write {flag}=PATH: pytest takes a bare path for a test"
            )
            value, position = rest[position], position + 1
        given[option.dest] = [*given.get(option.dest, []), value] if option.kind == "list" else value
    settings = resolve(given.get, lambda _: None)
    assert settings.active or "--collect-only" in words, "the command would skip the suite"
    if settings["k8s"]:
        read_wanted(settings)
        return
    if settings["target"]:
        elsewhere = replace(settings, values={**settings.values, "target_ca": None})  # a file of the reader's
        read_named(elsewhere, {str(settings["target_api_key_env"]): "a-key"})
        return
    folders = [shipped_fixtures()]
    for name in settings["topology"].split(","):
        assert name in available("topologies", folders)


@pytest.mark.parametrize(("title", "text"), list(blocks("yaml", README)))
def test_yaml_examples_load(title: str, text: str, tmp_path: Path) -> None:
    title = title or text.partition("\n")[0].removeprefix("# ")
    assert title.endswith((".yml", ".yaml", "(excerpt)")), "say with title= what a YAML example is"
    if ".github" in title:
        assert yaml.safe_load(text)["jobs"]
        return
    path = tmp_path / Path(title).name
    path.write_text(text)
    if "topologies" in title:
        load_topology(path)
    elif "workloads" in title:
        load_workload(path)
    else:
        load_tolerances(path)


def test_the_row_in_the_documentation_is_one_that_the_gate_writes() -> None:
    (text,) = [one.values[1] for one in blocks("text") if one.values[0] == "verdict row"]
    row = VerdictRow(
        metric="ttft_ms_p50",
        verdict=Verdict.FAIL,
        unit="ms",
        direction=1,
        value=126.4,
        baseline=100.1,
        change=126.4 / 100.1 - 1,
        limit=0.1,
        binding="tolerance",
        n=32,
        launches=5,
        detectable=0.141,
        stage=2,
        p=0.002,
    )
    assert str(text).strip() == row.line()


def test_the_documentation_names_every_verdict() -> None:
    text = (DOCS / "how-to" / "failure.md").read_text() + (DOCS / "reference" / "verdicts.md").read_text()
    assert all(f"`{verdict}`" in text for verdict in Verdict)


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        text = BLOCK.sub("", page.read_text())
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if not target.startswith(("http", "mailto:")) and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    missing = [
        str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if str(page.relative_to(DOCS)) not in text
    ]
    assert missing == []


@pytest.mark.parametrize("name", ["nightly.yml", "pull-request.yml"])
def test_workflows_are_lean_with_rights_and_pin_their_actions(name: str) -> None:
    data = yaml.safe_load((DOCS / "examples" / name).read_text())
    assert data["permissions"] == {"contents": "read"}
    for job in data["jobs"].values():
        writes = [right for right, level in job.get("permissions", {}).items() if level == "write"]
        runs = "\n".join(step.get("run", "") for step in job["steps"])
        assert not writes or "pytest" not in runs, "a job that may write measures nothing"
        assert "${{" not in runs, "expressions go through env, never into a shell"
        assert all(re.search(r"@v\d+$", step["uses"]) for step in job["steps"] if "uses" in step)
        assert "timeout-minutes" in job or "pytest" not in runs


def test_options_named_in_prose_exist() -> None:
    known = set(FLAGS) | {
        "--check",
        "--cov",
        "--collect-only",
        "--junitxml",
        "--clean",
        "--json",
        "--plot",
        "--num-profile-runs",
    }
    known |= {word for words in commands("pdperf") for word in words.values[0] if word.startswith("--")}
    unknown = {
        f"{page.relative_to(ROOT)}: {flag}"
        for page in PAGES
        if page.name != "adding-an-engine.md"
        for flag in re.findall(r"`(--[a-z][a-z-]+)", page.read_text())
        if flag not in known and page.parent.name != "reference"
    }
    assert unknown == set()
    assert "engine" in BY_NAME


def checked(*workflows: Path) -> subprocess.CompletedProcess[str]:
    """GitHub's own schema of workflow files, as check-jsonschema ships it: nothing is fetched."""
    pytest.importorskip("check_jsonschema")
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, workflows)]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, check=False)


def test_example_workflows_are_what_github_takes(tmp_path: Path) -> None:
    examples = sorted((DOCS / "examples").glob("*.yml"))
    assert len(examples) >= 2
    done = checked(*examples)
    assert done.returncode == 0, done.stdout + done.stderr
    spoilt = tmp_path / "spoilt.yml"
    spoilt.write_text(examples[0].read_text().replace("runs-on:", "runs_on:"))
    assert checked(spoilt).returncode == 1, "this check can fail"
