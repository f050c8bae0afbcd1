"""Engines add, rename and drop flags: says before a start which ones the installed version does not take.

The sources that define an engine's command line are read where they are installed: what its `--help` says, without the
half minute that importing the engine takes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Container, Iterator, Sequence
from functools import cache
from pathlib import Path

from pytest_pdperf.engines.installed import site_folders
from pytest_pdperf.errors import UsageProblem

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_FLAG = re.compile(r"[\"']--([a-z][a-z0-9-]*)[\"']")


def sources(program: Path | None, patterns: Sequence[str]) -> tuple[Path, ...]:
    """Files of a package installed beside `program`, by glob patterns; empty when a pattern has no file there."""
    for folder in site_folders(program) if program is not None else ():
        found = [sorted(folder.glob(pattern)) for pattern in patterns]
        if all(found):
            return tuple(path for paths in found for path in paths)
    return ()


@cache
def _words(files: tuple[Path, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """(every word, every quoted flag) of some files, with underscores."""
    text = "\n".join(path.read_text("utf-8", "replace") for path in files)
    words = frozenset(word.replace("-", "_") for word in _WORD.findall(text))
    return words, frozenset(flag.replace("-", "_") for flag in _FLAG.findall(text))


def has_word(files: tuple[Path, ...], word: str) -> bool:
    """Whether the files mention it; True without files, as nothing is known then."""
    return not files or word in _words(files)[0]


def unknown_flags(files: tuple[Path, ...], argv: Sequence[str]) -> Iterator[str]:
    """Flags of a command line, without dashes, that the files do not mention anywhere; none without files.

    A flag that is a word there for another reason passes: what this names is unknown for certain.
    """
    if not files:
        return
    words, _ = _words(files)
    for part in argv:
        if part.startswith("--") and len(part) > 3:
            name = part[2:].partition("=")[0].partition(".")[0].replace("-", "_")
            if name not in words and name.removeprefix("no_") not in words:
                yield name


def refuse_unknown(
    files: tuple[Path, ...],
    argv: Sequence[str],
    given: Container[str],
    *,
    place: str,
    engine: str,
    written_for: str,
    help: str,
) -> None:
    """Raise UsageProblem for the first flag that the installed version lacks.

    `given` are the user's own, with underscores; the others are written by this suite for the versions `written_for`.
    `engine` is name and version, `help` the command that lists its flags.
    """
    for name in unknown_flags(files, argv):
        flag = "--" + name.replace("_", "-")
        if name in given or name.removeprefix("no_") in given:
            near = difflib.get_close_matches(name, _words(files)[1], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageProblem(
                f"{place}{name}: {engine} has no flag {flag}{hint} (`{help}` lists them); leave it out "
                "or use a version that has it"
            )
        raise UsageProblem(
            f"{engine} has no flag {flag}, which every command line for it needs: they are written for {written_for}; "
            "install one of those versions (--engine-env)"
        )
