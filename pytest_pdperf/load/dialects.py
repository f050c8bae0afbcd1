"""What one event of each API says, in one vocabulary: text, token ids, running count, finish reason, error.

OpenAI completions and chat send differences; SGLang's native `/generate` sends the text so far and counts in
`meta_info`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Said:
    """Content of one event."""

    text: str = ""
    """New text only, reasoning included."""
    keeps: int | None = None
    """Characters of the text so far that still stand, None for all: an answer that repeats itself may mend its end."""
    carries: bool = False
    """Holds text, reasoning, a tool-call delta or token ids."""
    token_ids: tuple[int, ...] = ()
    completion_tokens: int | None = None
    """Running or final count of the server."""
    prompt_tokens: int | None = None
    has_choices: bool = False
    """A grown count on an event without choices is accounting, not a token."""
    finish_reason: str | None = None
    error: str | None = None


def error_of(data: Mapping[str, Any]) -> str | None:
    """One line for a truthy top-level `error` (object or string), None for `"error": null` or none at all."""
    error = data.get("error")
    if not error:
        return error_of_object(data) if data.get("object") == "error" else None
    if isinstance(error, Mapping):
        return error_of_object(error)
    return " ".join(str(error).split())


def error_of_object(error: Mapping[str, Any]) -> str:
    """`code type: message` of an error object, with what is there of them."""
    label = " ".join(str(error[k]) for k in ("code", "type") if error.get(k))
    message = " ".join(str(error.get("message") or error).split())
    return f"{label}: {message}" if label else message


def _count(usage: object, key: str) -> int | None:
    value = usage.get(key) if isinstance(usage, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _ids(value: object) -> tuple[int, ...]:
    return tuple(i for i in value if isinstance(i, int)) if isinstance(value, list) else ()


def read_openai(data: Mapping[str, Any]) -> Said:
    """An event (or a whole answer) of `/v1/completions` or `/v1/chat/completions`."""
    said = Said(error=error_of(data))
    usage = data.get("usage")
    said.completion_tokens = _count(usage, "completion_tokens")
    said.prompt_tokens = _count(usage, "prompt_tokens")
    choices = data.get("choices")
    if not isinstance(choices, list):
        return said
    for choice in choices:
        if isinstance(choice, Mapping):
            said.has_choices = True
            _read_choice(choice, said)
    return said


def _read_choice(choice: Mapping[str, Any], said: Said) -> None:
    delta = choice.get("delta") or choice.get("message") or {}
    if not isinstance(delta, Mapping):
        delta = {}
    pieces = [
        choice.get("text"),
        delta.get("reasoning_content") or delta.get("reasoning"),
        delta.get("content"),
        delta.get("refusal"),
    ]
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    ids = _ids(choice.get("token_ids"))
    said.text += text
    said.token_ids += ids
    if text or ids or _calls(delta):
        said.carries = True
    said.error = said.error or error_of(choice)
    _read_finish(choice.get("finish_reason"), said)


def _calls(delta: Mapping[str, Any]) -> bool:
    """Whether a delta says part of a tool call: a name or arguments. Empty strings only open or close one."""
    listed = delta.get("tool_calls")
    calls = listed if isinstance(listed, list) else []
    parts = [call.get("function") or call.get("custom") for call in calls if isinstance(call, Mapping)]
    return any(
        isinstance(part, Mapping) and any(part.get(key) for key in ("name", "arguments", "input"))
        for part in (*parts, delta.get("function_call"))
    )


def _read_finish(reason: object, said: Said) -> None:
    """Why it ended: a word, or SGLang's object with a type. What the server calls an error is one."""
    if not reason:
        return
    said.finish_reason = (
        str(reason.get("type") or dict(reason)) if isinstance(reason, Mapping) else str(reason)
    )
    message = reason.get("message") if isinstance(reason, Mapping) else None
    if message and said.finish_reason == "abort":
        said.error = said.error or f"abort: {' '.join(str(message).split())}"
    if said.finish_reason == "error":
        said.error = (
            said.error or f"finish_reason error: {' '.join(str(message or 'without a message').split())}"
        )


@dataclass(slots=True)
class GenerateReader:
    """Events of SGLang's `/generate`: remembers the text so far, because each event repeats it.

    With `--incremental-streaming-output` an event holds what is new instead. Where `output_ids` and the running count
    are there, as many ids as the count says is everything so far; else what starts with the text so far is, and so is
    what mends the end of it: a character that was whole only with the next token, tokens that were retracted.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    count: int = 0
    repeating: bool = False
    """Text was seen to grow by repeating itself."""

    def __call__(self, data: Mapping[str, Any]) -> Said:
        """What this event adds to the ones before it."""
        said = Said(error=error_of(data))
        meta = data.get("meta_info")
        said.has_choices = isinstance(meta, Mapping) or "text" in data
        said.completion_tokens = _count(meta, "completion_tokens")
        said.prompt_tokens = _count(meta, "prompt_tokens")
        text, ids = data.get("text"), _ids(data.get("output_ids"))
        whole = len(ids) == said.completion_tokens if ids and said.completion_tokens is not None else None
        if isinstance(text, str) and text:
            self._read_text(text, said, whole)
        if ids:
            repeats = ids[: len(self.ids)] == self.ids if whole is None else whole
            said.token_ids = ids[len(self.ids) :] if repeats else ids
            self.ids = ids if repeats else self.ids + ids
        said.carries = bool(said.text or said.token_ids)
        self.count = self.count if said.completion_tokens is None else said.completion_tokens
        _read_finish(meta.get("finish_reason") if isinstance(meta, Mapping) else None, said)
        return said

    def _read_text(self, text: str, said: Said, whole: bool | None) -> None:
        if whole or (whole is None and self._repeats(text, said)):
            same = next((i for i, (a, b) in enumerate(zip(self.text, text, strict=False)) if a != b), None)
            same = min(len(self.text), len(text)) if same is None else same
            said.keeps = same if same < len(self.text) else None
            said.text = text[same:]
            self.text = text
        else:
            said.text = text
            self.text += text

    def _repeats(self, text: str, said: Said) -> bool:
        """Whether text without ids is everything so far rather than what is new."""
        if text.startswith(self.text):
            self.repeating = self.repeating or 0 < len(self.text) < len(text)
            return True
        retracted = said.completion_tokens is not None and said.completion_tokens < self.count
        halved = self.text.endswith(_HALF) and text.startswith(self.text.rstrip(_HALF))
        return self.repeating or retracted or halved


_HALF = "\ufffd"
"""Stands for a character of which some bytes are still to come."""
