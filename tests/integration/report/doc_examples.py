"""The code blocks of the documentation, the README and the example workflows, as pytest parameters."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
README = ROOT / "README.md"
LEFT_OUT = (
    (re.compile(r"(?<=^pytest) \.\.\."), " -m pd --gpus=0-7 --model=Qwen/Qwen3-32B"),
    (re.compile(r"(?<=--plan) \.\.\.$"), " --model=Qwen/Qwen3-32B"),
    (re.compile(r" ?\.\.\.$"), ""),
    (re.compile(r"(?<=role=)(\w+)=URL"), r"\1=http://\1:8000"),
)
"""What the README's list of commands leaves to its reader."""
BLOCK = re.compile(r"^```(\w+)?(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.M | re.S)


def blocks(language: str, *more: Path) -> Iterator[Any]:
    """(title, text) of every code block of a language, as pytest parameters."""
    for page in (*PAGES, *more):
        for number, (found, title, text) in enumerate(BLOCK.findall(page.read_text())):
            if found == language:
                yield pytest.param(title, text, id=f"{page.relative_to(ROOT)}-{number}")


def commands(*first: str) -> list[Any]:
    """Every command line of the documentation and the examples that starts with such a word, whole.

    A command that another one runs or reads (`sbatch --wrap`, `source <(...)`) counts as well.
    """
    found: dict[tuple[str, ...], Any] = {}
    for line in lines():
        words = tuple(shlex.split(line.partition(" > ")[0], comments=True))
        if words[:1] == ("sbatch",):
            words = tuple(shlex.split(words[words.index("--wrap") + 1]))
        if words[:1] in [(word,) for word in first]:
            found[words] = pytest.param(words, id=shlex.join(words)[:90])
    return list(found.values())


def lines() -> Iterator[str]:
    """Every line of shell, a continued one as one, and the README's list of commands."""
    texts = [str(one.values[1]) for one in blocks("bash", README)]
    texts += re.findall(r"`((?:pytest|pdperf) [^`]+)`", README.read_text())
    texts += [text for path in sorted((DOCS / "examples").glob("*.yml")) for text in shell_of(path)]
    for text in texts:
        for line in text.replace("\\\n", " ").splitlines():
            inner = re.fullmatch(r"source <\((.*)\)", line)
            yield filled_in(inner[1] if inner else line)


def filled_in(line: str) -> str:
    """The line with what it leaves to its reader."""
    for mark, meant in LEFT_OUT:
        line = mark.sub(meant, line)
    return line


def shell_of(path: Path) -> list[str]:
    """The shell of a workflow's steps."""
    jobs = yaml.safe_load(path.read_text())["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
