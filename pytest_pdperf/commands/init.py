"""`pdperf init`: puts the suite, its YAML and its CI jobs into a repository, and never touches what is there."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  pdperf init                       into this directory
  pdperf init --dry-run             say what would be written, write nothing
  pdperf init ~/serving --no-ci     suite and YAML only
afterwards:
  pytest tests/perf -m pd --engine sim
"""

PARTS: tuple[tuple[str, str, str], ...] = (
    ("tests/perf", "*.py", "tests/perf"),
    ("fixtures", "topologies/*.yaml", "fixtures"),
    ("fixtures", "workloads/*.yaml", "fixtures"),
    ("fixtures", "workloads/traces/*.jsonl", "fixtures"),
    ("fixtures", "tolerances.yaml", "fixtures"),
)
"""(shipped folder, files in it, folder in the repository)."""

CI: tuple[tuple[str, str], ...] = (
    ("nightly.yml", ".github/workflows/pdperf-nightly.yml"),
    ("pull-request.yml", ".github/workflows/pdperf-pull-request.yml"),
)
"""(shipped example, place in the repository)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One file of the plan."""

    source: Path
    target: Path
    state: str
    """`new`, `same` (already there, equal) or `kept` (there, different: left alone)."""


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "init",
        help="put the suite into a repository",
        description="Copies perf tests, topologies, workloads, tolerances and CI jobs. Never changes a file.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directory", nargs="?", type=Path, default=Path(), help="root of the repository (here)"
    )
    parser.add_argument("--no-ci", action="store_true", help="no GitHub workflows")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Copy what is not there. Returns 0. Raises UsageProblem for a bad or unwritable directory."""
    from pytest_pdperf.errors import UsageProblem

    root = arguments.directory
    if not root.is_dir():
        raise UsageProblem(f"{root}: no such directory")
    plan = list(plan_of(root, ci=not arguments.no_ci))
    if not arguments.dry_run:
        plan = [_copy(step) if step.state == "new" else step for step in plan]
    for step in plan:
        words = {
            "new": "would write" if arguments.dry_run else "wrote",
            "same": "unchanged",
            "kept": "kept yours",
        }
        print(f"{words[step.state]:<12} {step.target.relative_to(root)}")
    if any(step.state == "kept" for step in plan):
        print("files of yours that differ from the shipped ones were left alone")
    print("next: pytest tests/perf -m pd --engine sim")
    return 0


def plan_of(root: Path, *, ci: bool) -> Iterator[Step]:
    """Every file that ships and what would become of it. Raises UsageProblem when the package lacks them."""
    from pytest_pdperf.errors import UsageProblem

    from .shipped import shipped

    for folder, pattern, place in PARTS:
        source = shipped(folder)
        files = sorted(source.glob(pattern))
        if not files:
            raise UsageProblem(
                f"{source}: the installed package lacks its {folder}/{pattern}; install it again"
            )
        for file in files:
            yield _step(file, root / place / file.relative_to(source))
    if ci:
        for name, place in CI:
            yield _step(shipped("docs/examples") / name, root / place)


def _step(source: Path, target: Path) -> Step:
    if not target.exists() and not target.is_symlink():
        return Step(source, target, "new")
    same = target.is_file() and target.read_bytes() == source.read_bytes()
    return Step(source, target, "same" if same else "kept")


def _copy(step: Step) -> Step:
    """Create the file; one that came into being since the plan was made is kept. Raises UsageProblem."""
    from pytest_pdperf.errors import UsageProblem

    try:
        step.target.parent.mkdir(parents=True, exist_ok=True)
        with step.target.open("xb") as file:
            file.write(step.source.read_bytes())
    except FileExistsError:
        return Step(step.source, step.target, "kept")
    except OSError as problem:
        raise UsageProblem(f"{step.target}: cannot be written: {problem.strerror or problem}") from None
    return step
