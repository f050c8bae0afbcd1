"""YAML text becomes plain data that still knows where each value stood, so that an error can name its line.

Only what a specification needs is read: mappings, lists, text, numbers, `true`/`false` and `null`, by the
rules of YAML 1.2. What YAML 1.1 guesses silently (`on`, `0777`, `1:30`, tags, merge keys) is refused or
stays text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from yaml.composer import Composer
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from pytest_pdperf.errors import UsageProblem

MAX_BYTES = 1 << 20
MAX_NODES = 20_000
"""Values of one file after its aliases are written out: more is a mistake or an alias bomb."""
MAX_DEPTH = 30
MAX_DIGITS = 18

Key = str | int
Loc = tuple[Key, ...]

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+\Z")
_NOT_FINITE = re.compile(r"[-+]?\.?(inf|nan)\Z", re.IGNORECASE)
_SWITCHES = frozenset({"on", "off", "yes", "no"})


class _Composer(Reader, Scanner, Parser, Composer, BaseResolver):
    """PyYAML's pure Python front half without any constructor: nothing in a file can run code."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None):
            raise yaml.MarkedYAMLError(
                None, None, f"tags such as {event.tag!r} are not allowed", event.start_mark
            )
        node: Node | None = super().compose_node(parent, index)
        return node


@dataclass(frozen=True, slots=True)
class Document:
    """One YAML file as plain data plus the line of every key and value."""

    path: str
    data: dict[str, object]
    lines: dict[Loc, int] = field(repr=False)
    """Line (from 1) where the key that leads to a value stands; list items: where the item starts."""
    raw: dict[Loc, str] = field(repr=False)
    """Scalars as they were typed."""

    def line(self, loc: Sequence[Key]) -> int:
        """Line of the deepest part of `loc` that the file really has."""
        key = tuple(loc)
        while key and key not in self.lines:
            key = key[:-1]
        return self.lines.get(key, 1)

    def problem(self, loc: Sequence[Key], message: str) -> UsageProblem:
        """An error that names file, line and key path."""
        where = ".".join(str(part) for part in loc)
        return UsageProblem(f"{self.path}:{self.line(loc)}: {where + ': ' if where else ''}{message}")


def read_document(path: Path) -> Document:
    """Read a YAML file whose top level is a mapping.

    Raises UsageProblem for a file that is missing, too large, not UTF-8, not YAML, empty, or not a mapping;
    for duplicate keys, tags, merge keys, `on/off/yes/no`, numbers that are not finite, and alias bombs.
    """
    try:
        with path.open("rb") as file:
            head = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageProblem(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(head) > MAX_BYTES:
        raise UsageProblem(
            f"{path}: larger than {MAX_BYTES} bytes; a specification is a page, not a data file"
        )
    try:
        text = head.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = head[: error.start].count(b"\n") + 1
        raise UsageProblem(f"{path}:{line}: not UTF-8 text (byte 0x{head[error.start]:02x})") from None
    return parse_document(text, str(path))


def parse_document(text: str, path: str) -> Document:
    """`read_document` for text that is already in memory; `path` is what errors call it."""
    try:
        composer = _Composer(text)
        root: Node | None = composer.get_single_node()
        if root is None:
            raise UsageProblem(f"{path}:1: the file is empty; it must hold a mapping")
        if not isinstance(root, MappingNode):
            raise UsageProblem(
                f"{path}:{_line(root)}: the top level must be a mapping (`key: value`), not {_what(root)}"
            )
        build = _Build(path)
        data = build.mapping(root, (), 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise UsageProblem(f"{path}:{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise UsageProblem(
            f"{path}:{line}: not valid YAML: character #x{_code(error.character):04x} is not allowed"
        ) from None
    except RecursionError:
        raise UsageProblem(f"{path}: nested too deeply (more than {MAX_DEPTH} levels)") from None
    return Document(path, data, build.lines, build.raw)


class _Build:
    """Turns composed nodes into data; counts values so that aliases cannot multiply without bound."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lines: dict[Loc, int] = {}
        self.raw: dict[Loc, str] = {}
        self.nodes = 0

    def fail(self, line: int, loc: Loc, message: str) -> UsageProblem:
        where = ".".join(str(part) for part in loc)
        return UsageProblem(f"{self.path}:{line}: {where + ': ' if where else ''}{message}")

    def value(self, node: Node, loc: Loc, depth: int) -> object:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise self.fail(_line(node), loc, f"more than {MAX_NODES} values once aliases are written out")
        if depth > MAX_DEPTH:
            raise self.fail(_line(node), loc, f"nested too deeply (more than {MAX_DEPTH} levels)")
        if isinstance(node, MappingNode):
            return self.mapping(node, loc, depth)
        if isinstance(node, SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self.lines[(*loc, index)] = _line(item)
                items.append(self.value(item, (*loc, index), depth + 1))
            return items
        if not isinstance(node, ScalarNode):  # pragma: no cover - YAML has three kinds of nodes
            raise self.fail(_line(node), loc, "unknown YAML node")
        self.raw[loc] = node.value
        return node.value if node.style is not None else self.scalar(node.value, _line(node), loc)

    def mapping(self, node: MappingNode, loc: Loc, depth: int) -> dict[str, object]:
        data: dict[str, object] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = _line(key_node)
            if not isinstance(key_node, ScalarNode):
                raise self.fail(line, loc, f"a key must be one word, not {_what(key_node)}")
            key = key_node.value
            if key == "<<" and key_node.style is None:
                raise self.fail(line, loc, "merge keys (`<<`) are not supported; write the keys out")
            if key in data:
                raise self.fail(line, (*loc, key), f"duplicate key {key!r}, first used on line {first[key]}")
            first[key] = line
            self.lines[(*loc, key)] = line
            data[key] = self.value(value_node, (*loc, key), depth + 1)
        return data

    def scalar(self, text: str, line: int, loc: Loc) -> object:
        """A plain (unquoted) scalar by the rules of YAML 1.2."""
        if text in ("", "~", "null", "Null", "NULL"):
            return None
        if "env" in loc[-2:-1]:
            return text  # the environment knows only text: `1.10` and `true` must arrive as they were typed
        if text in ("true", "True", "TRUE"):
            return True
        if text in ("false", "False", "FALSE"):
            return False
        if text.lower() in _SWITCHES:
            raise self.fail(
                line, loc, f"{text!r} is ambiguous in YAML; write true or false, or quote it for text"
            )
        if _NOT_FINITE.match(text):
            raise self.fail(line, loc, f"{text!r} is not a finite number (quote it for text)")
        if _INT.match(text):
            if len(text.lstrip("+-")) > MAX_DIGITS:
                raise self.fail(line, loc, f"the number {_short(text)} is too large")
            return int(text)
        if _FLOAT.match(text) and not _LEADING_ZERO.match(text):
            number = float(text)
            if not math.isfinite(number):
                raise self.fail(line, loc, f"the number {_short(text)} is too large")
            return number
        return text


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _code(character: object) -> int:
    return character if isinstance(character, int) else ord(str(character)[:1] or "?")


def _what(node: Node) -> str:
    if isinstance(node, ScalarNode):
        return f"the value {_short(node.value)!r}"
    return "a mapping" if isinstance(node, MappingNode) else "a list"


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
