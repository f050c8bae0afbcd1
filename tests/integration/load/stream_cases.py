"""Stream cases as data: this repository's own and, where it lies beside it, the shared collection."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from tests.integration.load.scripted_server import Script, Segment

ROOT = Path(__file__).resolve().parents[3]
OWN = ROOT / "tests" / "data" / "streams" / "cases.yaml"
SHARED = ROOT.parent / "shared" / "cases"
_WORDS = {"lf": b"\n", "cr": b"\r", "crlf": b"\r\n", "bom": b"\xef\xbb\xbf", "done": b"data: [DONE]\n\n"}

ApiName = Literal["completions", "chat", "generate"]


@dataclass(frozen=True, slots=True)
class StreamCase:
    """One scripted answer and what its record must say."""

    name: str
    api: ApiName
    planned: int
    ignore_eos: bool
    script: Script
    want: Mapping[str, Any]


def own_cases() -> list[StreamCase]:
    """Every case of cases.yaml."""
    return [_case(entry) for entry in yaml.safe_load(OWN.read_text())]


def _case(entry: Mapping[str, Any]) -> StreamCase:
    api = entry.get("api", "completions")
    segments = [Segment(item[0], b"".join(_piece(p, api) for p in item[1:])) for item in entry["send"]]
    end = entry.get("end", "keep")
    script = Script(segments, end=end, end_delay_ms=entry.get("end_delay", 0), final_chunk=end != "hold")
    return StreamCase(
        entry["name"], api, entry.get("planned", 16), entry.get("ignore_eos", False), script, entry["want"]
    )


def _piece(piece: str | Mapping[str, Any], api: str) -> bytes:
    if isinstance(piece, str):
        return _WORDS.get(piece, piece.encode())
    if "hex" in piece:
        return bytes.fromhex(piece["hex"])
    return b"data: " + json.dumps(_event(piece, api), ensure_ascii=False).encode() + b"\n\n"


def _event(piece: Mapping[str, Any], api: str) -> dict[str, Any]:
    if "gen" in piece:
        prompt, completion = piece["meta"]
        reason = {"type": piece["finish"]} if "finish" in piece else None
        meta = {"prompt_tokens": prompt, "completion_tokens": completion, "finish_reason": reason}
        return {"text": piece["gen"], "meta_info": meta}
    event: dict[str, Any] = {"id": "own-1", "object": "chunk", "choices": []}
    content = [k for k in ("text", "role", "reasoning", "tool", "ids", "finish") if k in piece]
    if content:
        choice: dict[str, Any] = {"index": 0, "finish_reason": piece.get("finish")}
        if api == "chat":
            names = {"text": "content", "role": "role", "reasoning": "reasoning_content"}
            choice["delta"] = {names[k]: piece[k] for k in names if k in piece}
            if "tool" in piece:
                choice["delta"]["tool_calls"] = [{"index": 0, "function": {"arguments": piece["tool"]}}]
        else:
            choice["text"] = piece.get("text", "")
        if "ids" in piece:
            choice["token_ids"] = piece["ids"]
        event["choices"] = [choice]
    if "usage" in piece:
        usage = piece["usage"]
        event["usage"] = usage and {
            "prompt_tokens": usage[0],
            "completion_tokens": usage[1],
            "total_tokens": sum(usage),
        }
    return event


def shared_cases(final_chunk: bool) -> list[StreamCase]:
    """Every runnable stream variant of the shared collection, empty when it is not there."""
    cases = []
    for path in sorted(SHARED.glob("*.yaml")):
        data = yaml.safe_load(path.read_text())
        if data["kind"] != "stream":
            continue
        for variant in data["input"]["variants"]:
            request = variant["request"]
            segments = [
                Segment(delay, bytes.fromhex(body["hex"]) if isinstance(body, dict) else body.encode())
                for delay, body in variant["segments"]
            ]
            script = Script(
                segments,
                end=variant.get("end", "close"),
                end_delay_ms=variant.get("end_delay_ms", 0),
                final_chunk=final_chunk,
            )
            cases.append(
                StreamCase(
                    f"{data['id']}:{variant['name']}",
                    "chat" if "chat" in request["endpoint"] else "completions",
                    request["max_tokens"],
                    request["ignore_eos"],
                    script,
                    data["expected"][variant["name"]],
                )
            )
    return cases
