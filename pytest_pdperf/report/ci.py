"""What a finished run leaves for people and for CI: files in its folder, a step summary and annotations on GitHub."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pytest_pdperf.gate.verdict import VERDICTS, Verdict

from .grid import build_grid
from .heat import SYMBOLS
from .outcomes import CellOutcome, RunSummary
from .source import Run, run_of

STEP_SUMMARY_LIMIT = 900_000
"""Bytes; GitHub drops a step summary above 1 MiB altogether."""

ANNOTATIONS_SHOWN = 10
"""Of each level: GitHub shows no more for a step."""


def write_run_outputs(
    summary: RunSummary,
    *,
    require_baseline: bool = False,
    exit_status: int | None = None,
    environ: Mapping[str, str] | None = None,
    emit: Callable[[str], None] = print,
) -> list[Path]:
    """Write `report.html`, `report.md` and `summary.json` into the run's folder; on GitHub also a step summary
    and annotations. Returns the files that were written.

    Never raises and never fails a run: what goes wrong becomes one warning line through `emit`, which also gets
    the annotations.
    """
    env = os.environ if environ is None else environ
    written: list[Path] = []
    troubles: list[str] = []

    def attempt(what: str, act: Callable[[], Path | None]) -> None:
        try:
            path = act()
        except Exception as problem:  # a report must never cost a night's measurements
            troubles.append(f"{what}: {str(problem) or type(problem).__name__}")
        else:
            if path is not None:
                written.append(path)

    try:
        run = run_of(summary)
    except Exception as problem:  # the same
        emit(f"pdperf: warning: no report: {str(problem) or type(problem).__name__}")
        return written
    folder = summary.folder
    attempt("summary.json", lambda: _summary(run, folder, require_baseline, exit_status))
    attempt("report.md", lambda: _markdown(run, folder))
    attempt("report.html", lambda: _html(run, folder))
    if target := env.get("GITHUB_STEP_SUMMARY"):
        attempt("GITHUB_STEP_SUMMARY", lambda: _step_summary(run, Path(target)))
    if env.get("GITHUB_ACTIONS") == "true":
        attempt("annotations", lambda: _annotate(run, require_baseline, emit))
    if troubles:
        emit(f"pdperf: warning: {'; '.join(' '.join(trouble.split()) for trouble in troubles)}")
    return written


def _summary(run: Run, folder: Path, require_baseline: bool, exit_status: int | None) -> Path:
    from .summary_json import summary_of, write_summary_json

    data = summary_of(run, require_baseline=require_baseline, exit_status=exit_status)
    return write_summary_json(data, folder / "summary.json")


def _markdown(run: Run, folder: Path) -> Path:
    from .markdown import write_markdown

    return write_markdown([run], folder / "report.md")


def _html(run: Run, folder: Path) -> Path:
    from .html import write_html

    return write_html([run], folder / "report.html")


def _step_summary(run: Run, target: Path) -> None:
    text = step_summary(run)
    with target.open("a", encoding="utf-8", errors="replace") as file:
        file.write(text)


def step_summary(run: Run) -> str:
    """Verdict counts, what needs attention, and the tables, as GitHub's Markdown; cut at a line before its limit."""
    from .balance import balance
    from .contest import contest
    from .markdown import claim_lines, missing_lines, result_lines, section_lines, verdict_lines

    grid = build_grid([run])
    title = "PD performance" + (
        " (SIMULATED engines: no measurement of any hardware)" if run.simulated else ""
    )
    lines = [
        f"# {title}",
        "",
        *verdict_lines(grid),
        *missing_lines(grid),
        *result_lines(grid),
        *section_lines(contest(grid)),
        *section_lines(balance(grid)),
        *claim_lines(grid),
    ]
    kept, size = [], 0
    for line in lines:
        size += len(line.encode("utf-8", "replace")) + 1
        if size > STEP_SUMMARY_LIMIT:
            kept += ["", "Cut here: the whole is in report.md of the run's folder."]
            break
        kept.append(line)
    return "\n".join(kept) + "\n"


def _annotate(run: Run, require_baseline: bool, emit: Callable[[str], None]) -> None:
    for line in annotation_lines(run, require_baseline=require_baseline):
        emit(line)


def annotation_lines(run: Run, *, require_baseline: bool = False) -> list[str]:
    """GitHub workflow commands: an error for each blocking cell, a warning for each that proves nothing."""
    levels: dict[str, list[CellOutcome]] = {"error": [], "warning": []}
    for outcome in run.outcomes:
        if outcome.red(require_baseline):
            levels["error"].append(outcome)
        elif outcome.verdict == Verdict.NOISY:
            levels["warning"].append(outcome)
    return [line for level, outcomes in levels.items() for line in _commands(level, outcomes)]


def _commands(level: str, outcomes: Sequence[CellOutcome]) -> Iterator[str]:
    shown = outcomes if len(outcomes) <= ANNOTATIONS_SHOWN else outcomes[: ANNOTATIONS_SHOWN - 1]
    for outcome in shown:
        title = (
            f"{SYMBOLS.get(outcome.verdict, '')} {outcome.verdict} {outcome.topology} {outcome.result.cell}"
        )
        text = "\n".join(outcome.rows or outcome.result.invalid) or VERDICTS[Verdict(outcome.verdict)].meaning
        file = outcome.nodeid.partition("::")[0]
        yield f"::{level} file={_property(file)},title={_property(title)}::{_data(text)}"
    if len(shown) < len(outcomes):
        rest = len(outcomes) - len(shown)
        yield f"::{level} title=pdperf::{rest} more cells; see report.html of the run's folder"


def _data(text: str) -> str:
    """Message of a workflow command: percent and line ends are encoded, so that no text can start a command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Property of a workflow command: also the separators are encoded."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
