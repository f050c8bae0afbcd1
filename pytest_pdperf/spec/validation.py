"""A validation error must be enough to mend the file: place, value, and what would have been right."""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pytest_pdperf.errors import UsageProblem

from .document import Document, Key

MAX_REPORTED = 5

Model = TypeVar("Model", bound=BaseModel)

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
    "none_required": "null",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_PLACED = re.compile(r"([a-z_]+(?:\.[A-Za-z0-9_-]+)*): ")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be, or None when nothing is close."""
    options = list(known)
    by_lower = {option.lower(): option for option in options}
    found = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'? Known: ...` for the end of an error message; empty when nothing is known."""
    options = list(dict.fromkeys(known))
    if not options:
        return ""
    near = nearest(word, options)
    listed = ", ".join(options[:20]) + (", ..." if len(options) > 20 else "")
    return f"; did you mean {near!r}? Known: {listed}" if near else f"; known: {listed}"


def validate(
    model: type[Model], data: Mapping[str, object], document: Document, extra: Sequence[str] = ()
) -> Model:
    """Build `model` from a document's data without coercion: no text for a number, no `true` for 1.

    `extra` names fields that the caller adds and the file may not hold. Raises UsageProblem with at most
    MAX_REPORTED errors, one a line.
    """
    try:
        return model.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise _problem(found, model, data, document, extra) from None


def _problem(
    found: Sequence[ErrorDetails],
    model: type[BaseModel],
    data: Mapping[str, object],
    document: Document,
    extra: Sequence[str],
) -> UsageProblem:
    places: dict[tuple[Key, ...], list[ErrorDetails]] = {}
    for detail in found:
        places.setdefault(_real_loc(detail, data), []).append(detail)
    lines = []
    for loc, details in places.items():
        # A union reports every member that did not match; what lies deeper is the member that was meant.
        if not any(len(other) > len(loc) and other[: len(loc)] == loc for other in places):
            lines.append(str(document.problem(loc, _message(details, loc, model, extra))))
    more = len(lines) - MAX_REPORTED
    return UsageProblem("\n".join(lines[:MAX_REPORTED] + ([f"... and {more} more"] if more > 0 else [])))


def _real_loc(detail: ErrorDetails, data: object) -> tuple[Key, ...]:
    """The part of pydantic's location that exists in the file, without union members and `[key]` marks.

    A validator of a whole model places its message by starting it with a key path: `placement.decode-0: ...`.
    """
    loc: tuple[Key, ...] = detail["loc"]
    real: list[Key] = []
    here = data
    for position, part in enumerate(loc):
        if isinstance(here, Mapping):
            if part in here:
                real.append(part)
                here = here[part]
            elif part == "[key]":
                break
            elif position == len(loc) - 1:
                real.append(part)
        elif isinstance(here, list) and isinstance(part, int):
            real.append(part)
            here = here[part] if part < len(here) else None
    if detail["type"] == "value_error":
        for name in _placed(_raised(detail))[0]:
            if not isinstance(here, Mapping) or name not in here:
                break
            real.append(name)
            here = here[name]
    return tuple(real)


def _raised(detail: ErrorDetails) -> str:
    return str(detail.get("ctx", {}).get("error", detail["msg"]))


def _placed(message: str) -> tuple[list[str], str]:
    """`a.b: text` as (["a", "b"], "text"); a message without a key path as ([], message)."""
    match = _PLACED.match(message)
    return (match[1].split("."), message[match.end() :]) if match else ([], message)


def _message(
    details: Sequence[ErrorDetails], loc: Sequence[Key], model: type[BaseModel], extra: Sequence[str]
) -> str:
    detail = details[0]
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    last = str(loc[-1]) if loc else ""
    if kind == "extra_forbidden":
        parent = _model_at(model, tuple(loc)[:-1])
        fields = list(parent.model_fields) if parent else []
        return f"unknown key{suggestion(last, [f for f in fields if len(loc) > 1 or f not in extra])}"
    if kind == "missing":
        return "this key is missing"
    if kind in ("literal_error", "enum", "union_tag_invalid"):
        options = re.findall(r"'([^']*)'", str(context.get("expected", context.get("expected_tags", ""))))
        return f"{_show(value)} is not known{suggestion(str(value), options)}"
    if kind == "value_error":
        return _placed(_raised(detail))[1]
    if kind in _EXPECTED:
        wanted = list(dict.fromkeys(_EXPECTED[d["type"]] for d in details if d["type"] in _EXPECTED))
        expected = " or ".join(filter(None, [", ".join(wanted[:-1]), wanted[-1]]))
        return f"must be {expected}, got {'nothing' if value is None else _show(value)}"
    if kind in _BOUNDS:
        word, key = _BOUNDS[kind]
        bound = context.get(key)
        return f"must be {word} {f'{bound:g}' if isinstance(bound, float) else bound}, got {_show(value)}"
    if kind == "too_short":
        return "must not be empty"
    return f"{detail['msg']}, got {_show(value)}"


def _model_at(model: type[BaseModel], loc: Sequence[Key]) -> type[BaseModel] | None:
    """The model that describes the mapping at `loc`, found by walking the annotations."""
    here: Any = model
    for part in loc:
        if isinstance(here, type) and issubclass(here, BaseModel):
            info = here.model_fields.get(str(part))
            here = info.annotation if info else None
        else:
            here = _inner(here)
        here = _unwrap(here)
    return here if isinstance(here, type) and issubclass(here, BaseModel) else None


def _unwrap(annotation: Any) -> Any:
    """Takes the model out of `X | None`; leaves anything else alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        models = [a for a in members if isinstance(a, type) and issubclass(a, BaseModel)]
        return models[0] if len(models) == 1 else (members[0] if len(members) == 1 else annotation)
    return annotation


def _inner(annotation: Any) -> Any:
    """Element type of a list, tuple or dict annotation."""
    members = [a for a in typing.get_args(annotation) if a is not Ellipsis]
    return members[-1] if members else None


def _show(value: object) -> str:
    if isinstance(value, Enum):
        value = value.value
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
