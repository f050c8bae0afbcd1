"""The benchmark's peers: what each reports is read as it means it, and one that is missing is named with the reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.client import environments, tools
from benchmarks.client.load import Load
from benchmarks.client.plan import LADDER, SECTIONS, rung
from benchmarks.client.score import score
from benchmarks.client.tables import Table, print_table, write_markdown
from benchmarks.client.tools import TOOLS, ToolFailed, run_tool
from scripts.cpu_vllm.build import BuildError, Environment

MS = 1_000_000
LOAD = Load(streams=1, requests=2, tokens=3, ttft_ms=50, itl_ms=10)
TRUTH = {
    "n0": [0, 50 * MS, 60 * MS, 70 * MS],
    "n1": [100 * MS, 150 * MS, 160 * MS, 180 * MS],
    "n2": [0, 40 * MS, 50 * MS, 60 * MS],
}


def test_sglang_is_matched_by_its_texts(tmp_path: Path) -> None:
    """Answers come in the order of the prompts, which the server need not have seen in that order."""
    details = {
        "ttfts": [0.051, 0.042],
        "itls": [[0.01, 0.02], [0.01, 0.01]],
        "generated_texts": [" n1 tok tok", " n2 tok tok"],
    }
    (tmp_path / "sglang.jsonl").write_text('{"an": "older line"}\n' + json.dumps(details) + "\n")
    found = score(LOAD, tools.sglang_report(tmp_path, 0.0), TRUTH)
    assert found.ttft_p50 == 1.5
    assert found.itl_p99_error == pytest.approx(0)


def test_guidellm_reports_first_tokens_and_no_gaps(tmp_path: Path) -> None:
    rows = [
        {"output": " n0 tok tok", "time_to_first_token_ms": 53.0},
        {"output": " n2 tok", "time_to_first_token_ms": 41.0},
    ]
    report = {"benchmarks": [{"requests": {"successful": rows, "errored": []}}]}
    (tmp_path / "guidellm.json").write_text(json.dumps(report))
    found = score(LOAD, tools.guidellm_report(tmp_path, 0.0), TRUTH)
    assert (found.ttft_p50, found.itl_p99_error, found.event_p50) == (2.0, None, None)


def test_a_program_that_lost_a_request_is_no_score(tmp_path: Path) -> None:
    rows = [{"output": "", "time_to_first_token_ms": 53.0}]
    (tmp_path / "guidellm.json").write_text(json.dumps({"benchmarks": [{"requests": {"successful": rows}}]}))
    with pytest.raises(ValueError, match="0 of 2 requests"):
        score(LOAD, tools.guidellm_report(tmp_path, 0.0), TRUTH)


@pytest.mark.parametrize("name", TOOLS)
def test_every_program_is_asked_for_the_same_load(name: str) -> None:
    command = TOOLS[name][0](Path("/env"), "http://127.0.0.1:9", LOAD, "/tok", Path("/out"))
    text = " ".join(command)
    assert command[0].startswith("/env/bin/")
    assert "http://127.0.0.1:9" in text and "/tok" in text and "paced" in text
    numbers = [part for word in command for part in word.replace("=", ",").split(",")]
    assert {str(LOAD.requests), str(LOAD.prompt_tokens), str(LOAD.tokens)} <= set(numbers)


def test_a_program_that_fails_says_its_last_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; print('ValueError: no such model'); print('bye'); sys.exit(3)"
    broken = {"broken": (lambda *_: [sys.executable, "-c", script], tools.vllm_report)}
    monkeypatch.setattr(tools, "TOOLS", broken)
    with pytest.raises(ToolFailed, match="exit status 3: ValueError: no such model"):
        run_tool("broken", tmp_path, "http://127.0.0.1:9", LOAD, "", tmp_path, 0)


def test_an_environment_that_cannot_be_built_is_named_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(name: str, torch_index: str | None) -> Path:
        if name == "aiperf":
            raise BuildError(
                "`pip install ...` ended with status 1\n  ERROR: No matching distribution\n  bye"
            )
        return Path("/env") / name

    monkeypatch.setattr(environments, "build", build)
    built = environments.build_all(["loops", "aiperf", "guidellm"])
    assert built.environments == {"loops": Path("/env/loops"), "guidellm": Path("/env/guidellm")}
    assert built.missing == {"aiperf": "ERROR: No matching distribution"}


def test_a_finished_environment_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is named by its pins; what an interrupted build left is thrown away."""
    calls: list[tuple[object, ...]] = []

    def call(self: Environment, *command: str | Path, hint: str = "") -> None:
        calls.append(command)
        if "venv" in command:
            assert not (self.path / "half").exists()
            self.python.parent.mkdir(parents=True)
            self.python.touch(0o755)

    monkeypatch.setenv("PDPERF_CACHE", str(tmp_path))
    monkeypatch.setattr(Environment, "call", call)
    first = environments.build("loops")
    assert first.parent == tmp_path and first.name.startswith("peer-loops-")
    assert [c[-1] for c in calls if "pip" in c] == [environments.HERE / "requirements" / "loops.txt"]
    made = len(calls)
    assert environments.build("loops") == first
    assert len(calls) == made
    (first / "complete").unlink()
    (first / "half").touch()
    environments.build("loops")
    assert len(calls) == 2 * made


def test_every_peer_has_a_closed_list_of_pins() -> None:
    for name in environments.CHECKS:
        lines = (environments.HERE / "requirements" / f"{name}.txt").read_text().splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        assert pins and all("==" in pin for pin in pins), name


def test_tables_for_the_documentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Columns in which nobody has a number are left out; a client that did not run says why."""
    rows: dict[str, list[str] | str] = {"pdperf": ["1", "-", "3"], "aiperf": "ERROR: no | luck"}
    table = Table("64 x 50/s", ("|a| p50", "b", "c"), rows)
    path = tmp_path / "t.md"
    write_markdown(path, ["a machine, a date"], [table])
    assert path.read_text().splitlines() == [
        "a machine, a date.",
        "",
        "**64 x 50/s**",
        "",
        "| client | \\|a\\| p50 | c |",
        "| --- | --- | --- |",
        "| pdperf | 1 | 3 |",
        "| aiperf | not run: ERROR: no   luck | |",
    ]
    print_table(table)
    assert "aiperf  not run: ERROR: no | luck" in capsys.readouterr().out


def test_loads_last_as_long_as_asked_and_keep_every_client_busy() -> None:
    load = Load(4, 99, 11, 100, 10)
    assert load.lasting(1.0).requests == 4 * 5
    assert load.lasting(0.01).requests == 4
    assert all(s.load.requests >= s.load.streams for s in SECTIONS.values())


@pytest.mark.parametrize("rate", LADDER)
def test_rungs_have_the_rate_they_are_called_by(rate: int) -> None:
    assert rung(rate).events_per_s == rate
