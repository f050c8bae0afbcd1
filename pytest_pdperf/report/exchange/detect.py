"""Tells whose file it is by what is in it: names of result files are whatever a user chose."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytest_pdperf.errors import UsageProblem

from . import aiperf, guidellm, mooncake, own, sglang_bench, vllm_bench
from .fields import Place, json_lines, json_object, parse, read_text
from .imported import ImportedResult
from .raw import MAGIC

Results = tuple[ImportedResult, ...]
SUPPORTED = {
    "vllm": "vllm bench serve --save-result (JSON, or JSON lines with --append-result)",
    "sglang": "sglang.bench_serving --output-file (JSON lines)",
    "aiperf": "aiperf profile_export.jsonl, its summary JSON of schema 1.x, or that of genai-perf",
    "guidellm": "guidellm JSON report of version 2",
    "mooncake": "Mooncake trace (JSON lines)",
    "pdperf": "pdperf export --as raw (Parquet)",
}


def import_file(path: Path, as_: str | None = None) -> Results:
    """Every benchmark in a foreign file, its format told from its content or given with `as_`.

    Raises UsageProblem for a format or version that is not known, naming what was found and what is read, and for a
    file whose numbers contradict each other.
    """
    if as_ is not None and as_ not in SUPPORTED:
        near = difflib.get_close_matches(as_, SUPPORTED, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageProblem(f"--as {as_!r}: want one of {', '.join(SUPPORTED)}{hint}")
    if as_ == "pdperf" or (as_ is None and _is_parquet(path)):
        return own.read(path)
    text = read_text(path)
    if not text.strip():
        raise UsageProblem(f"{path}: the file is empty")
    whole = _whole(text)
    first = whole if whole is not None else next(json_lines(text, path))[1]
    kind = as_ or _kind(first, path)
    return _READERS[kind](path, text, whole)


def _is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False  # said by whoever reads the file


def _whole(text: str) -> dict[str, Any] | None:
    """The file as one object, None when it is JSON lines or no JSON."""
    try:
        data = parse(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _kind(data: Mapping[str, Any], path: Path) -> str:
    if guidellm.looks_like(data):
        return "guidellm"
    if aiperf.looks_like_record(data) or aiperf.looks_like_summary(data):
        return "aiperf"
    if sglang_bench.looks_like(data):
        return "sglang"
    if vllm_bench.looks_like(data):
        return "vllm"
    if mooncake.looks_like(data):
        return "mooncake"
    keys = ", ".join(sorted(data)[:8]) or "none"
    known = "; ".join(SUPPORTED.values())
    raise UsageProblem(f"{path}: not a result file that is known (its keys: {keys}). Read are: {known}")


def _lines(path: Path, text: str, whole: dict[str, Any] | None) -> list[tuple[Place, dict[str, Any]]]:
    """The objects of a file: the one that it is, or one a line."""
    if whole is not None:
        return [(Place(path), whole)]
    return list(json_lines(text, path))


def _vllm(path: Path, text: str, whole: dict[str, Any] | None) -> Results:
    return tuple(vllm_bench.read(data, place) for place, data in _lines(path, text, whole))


def _sglang(path: Path, text: str, whole: dict[str, Any] | None) -> Results:
    return tuple(sglang_bench.read(data, place) for place, data in _lines(path, text, whole))


def _aiperf(path: Path, text: str, whole: dict[str, Any] | None) -> Results:
    if whole is not None and not aiperf.looks_like_record(whole):
        return (aiperf.read_summary(whole, Place(path)),)
    return (aiperf.read_records(_lines(path, text, whole), path),)


def _guidellm(path: Path, text: str, whole: dict[str, Any] | None) -> Results:
    place = Place(path)
    data = whole if whole is not None else json_object(text, place)
    if not isinstance(data.get("benchmarks"), list):
        raise place.problem("no guidellm report (it has no list of benchmarks)")
    return guidellm.read(data, place)


def _mooncake(path: Path, text: str, whole: dict[str, Any] | None) -> Results:
    return (mooncake.read(path),)


_READERS: Mapping[str, Callable[[Path, str, dict[str, Any] | None], Results]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "aiperf": _aiperf,
    "guidellm": _guidellm,
    "mooncake": _mooncake,
}
