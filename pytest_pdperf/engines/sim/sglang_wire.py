"""SGLang's words on the wire: bodies of `/generate` and of the OpenAI routes, bootstrap fields, errors.

Read off SGLang 0.5.17 (entrypoints/http_server.py, managers/tokenizer_manager.py, entrypoints/openai).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import orjson

from .request import Limits, Refused, Wanted
from .stream import DONE_EVENT, AnswerHead, usage
from .tokens import EOS_TOKEN, detokenize, tokenize

Route = Literal["generate", "completion", "chat"]

_NOT_SIMULATED = ("stop", "stop_token_ids", "stop_regex", "json_schema", "regex", "ebnf")
_DEFAULT_NEW_TOKENS = 128
_ROOMS = 2**64
ABORTED = "Aborted by AbortReq."


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Where decode finds its prefill engine, and the number under which the two legs of one request meet."""

    host: str
    port: int
    room: int


def bootstrap_of(body: Mapping[str, object]) -> Bootstrap | None:
    """The three fields that a router adds; None when there is no room. Raises Refused for odd ones.

    A room is a 64-bit integer and has to stay one: read as a double it loses its last digits.
    """
    room = body.get("bootstrap_room")
    if room is None:
        return None
    host, port = body.get("bootstrap_host"), body.get("bootstrap_port")
    if type(room) is not int or not 0 <= room < _ROOMS:
        raise Refused(400, f"bootstrap_room must be an integer of 64 bits, got {room!r}")
    if not isinstance(host, str) or not host:
        raise Refused(400, f"bootstrap_host must name the prefill engine's host, got {host!r}")
    if type(port) is not int or not 0 < port < 65536:
        raise Refused(400, f"bootstrap_port must be the prefill engine's bootstrap port, got {port!r}")
    return Bootstrap(host, port, room)


def parse_generate(body: Mapping[str, object], limits: Limits) -> Wanted:
    """Check a body of `/generate`: one prompt as `text` or `input_ids`. Raises Refused for what is not simulated."""
    params = body.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise Refused(
            400, "The simulated engine takes one request at a time: sampling_params must be an object."
        )
    for name in _NOT_SIMULATED:
        if params.get(name) not in (None, [], ""):
            raise Refused(400, f"The simulated engine does not support sampling_params.{name}.")
    if params.get("n") not in (None, 1):
        raise Refused(400, "The simulated engine supports only n=1.")
    prompt = _prompt(body, limits)
    asked = _count(params, "max_new_tokens", _DEFAULT_NEW_TOKENS, 1)
    total = len(prompt) + asked
    if total > limits.max_model_len:
        raise Refused(
            400,
            f"Requested token count exceeds the model's maximum context length of {limits.max_model_len} tokens. You "
            f"requested a total of {total} tokens: {len(prompt)} tokens from the input messages and {asked} tokens "
            "for the completion.",
        )
    return Wanted(
        api="completion",
        prompt=prompt,
        max_tokens=asked,
        min_tokens=_count(params, "min_new_tokens", 0, 0),
        ignore_eos=params.get("ignore_eos") is True,
        stream=body.get("stream") is True,
        include_usage=False,
        continuous_usage=False,
        return_token_ids=True,
        kv={},
    )


def _prompt(body: Mapping[str, object], limits: Limits) -> tuple[int, ...]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise Refused(400, "Either text, input_ids or input_embeds should be provided.")
    if isinstance(text, str):
        tokens = tuple(tokenize(text, limits.vocabulary))
    elif isinstance(ids, list) and all(type(token) is int for token in ids):
        tokens = tuple(ids)
    else:
        raise Refused(400, "The simulated engine takes one prompt a request.")
    if not tokens:
        raise Refused(400, "The prompt must not be empty.")
    worst = max(tokens) if max(tokens) >= limits.vocabulary else min(tokens)
    if not 0 <= worst < limits.vocabulary:
        raise Refused(
            400,
            f"The input_ids contain token id {worst}, which is out of the vocabulary (size {limits.vocabulary}).",
        )
    return tokens


def _count(params: Mapping[str, object], name: str, default: int, lowest: int) -> int:
    value = params.get(name)
    if value is None:
        return default
    if type(value) is not int or value < lowest:
        raise Refused(400, f"{name} must be at least {lowest}, got {value!r}.")
    return value


def refusal_body(route: Route | None, status: int, message: str, kind: str, param: str | None) -> bytes:
    """The error object of a route: flat on the OpenAI routes, nested on `/generate`."""
    if route in ("completion", "chat"):
        return orjson.dumps(
            {"object": "error", "message": message, "type": kind, "param": param, "code": status}
        )
    return orjson.dumps({"error": {"message": message}})


class GenerateWriter:
    """Events of `/generate`: each one repeats all text and ids so far, unless they are to be increments."""

    def __init__(self, head: AnswerHead, *, incremental: bool = False) -> None:
        self._head = head
        self._incremental = incremental
        self._text = ""
        self._ids = ""
        self._count = 0
        self.problem = "Internal server error"
        """What `error` and `refusal` say."""

    def opening(self) -> bytes:
        """Nothing comes before the first token."""
        return b""

    def first(self, token: int) -> bytes:
        """The event of the first token."""
        return self._event(token, None)

    def token(self, token: int, position: int) -> bytes:
        """The event of a token that is neither first nor last."""
        return self._event(token, None)

    def last(self, token: int, position: int, finish: str) -> bytes:
        """The event of the last token."""
        return self._event(token, finish)

    def final(self, completion: int) -> bytes:
        """The end mark; the counts are in every event."""
        return DONE_EVENT

    def error(self) -> bytes:
        """An event whose finish reason is `abort`: the status was sent long ago."""
        reason = {"type": "abort", "message": self.problem, "status_code": 500, "err_type": None}
        body = {"text": self._text, "output_ids": [], "meta_info": self._meta(reason)}
        return b"data: " + orjson.dumps(body) + b"\n\n" + DONE_EVENT

    def refusal(self) -> bytes:
        """Body of a status 500."""
        return orjson.dumps({"detail": self.problem})

    def whole(
        self, tokens: Sequence[int], finish: str, kv_transfer_params: dict[str, object] | None
    ) -> bytes:
        """Body of an answer that is not streamed."""
        self._count = len(tokens)
        meta = self._meta(_finish(finish, len(tokens)))
        return orjson.dumps({"text": detokenize(tokens), "output_ids": list(tokens), "meta_info": meta})

    def _event(self, token: int, finish: str | None) -> bytes:
        text = f" t{token}"
        if self._incremental:
            self._text, self._ids = text, str(token)
        else:
            self._text += text
            self._ids = f"{self._ids},{token}" if self._count else str(token)
        self._count += 1
        meta = orjson.dumps(self._meta(_finish(finish, self._count) if finish else None)).decode()
        return f'data: {{"text":"{self._text}","output_ids":[{self._ids}],"meta_info":{meta}}}\n\n'.encode()

    def _meta(self, finish: dict[str, object] | None) -> dict[str, object]:
        return {
            "id": self._head.id,
            "finish_reason": finish,
            "prompt_tokens": len(self._head.prompt),
            "weight_version": "default",
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": self._count,
            "cached_tokens": 0,
            "dp_rank": None,
        }


class OpenAiWriter:
    """Events and answers of SGLang's `/v1/completions` and `/v1/chat/completions`."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._object = "text_completion" if head.api == "completion" else "chat.completion.chunk"
        self.problem = "Internal server error"
        """What `error` and `refusal` say."""

    def opening(self) -> bytes:
        """Chat's event that carries only the role; nothing for completions."""
        if self._head.api == "completion":
            return b""
        delta = {"role": "assistant", "content": "", "reasoning_content": None, "tool_calls": None}
        return self._chunk([{"index": 0, "delta": delta, "logprobs": None, **_end(None)}], None)

    def first(self, token: int) -> bytes:
        """The event of the first token."""
        return self._event(token, 0, None)

    def token(self, token: int, position: int) -> bytes:
        """The event of a token that is neither first nor last."""
        return self._event(token, position, None)

    def last(self, token: int, position: int, finish: str) -> bytes:
        """The event of the last token."""
        return self._event(token, position, finish)

    def final(self, completion: int) -> bytes:
        """The usage event, when asked for, and the end mark."""
        if not self._head.include_usage:
            return DONE_EVENT
        counts = usage(len(self._head.prompt), completion) | {"reasoning_tokens": 0}
        return self._chunk([], counts) + DONE_EVENT

    def error(self) -> bytes:
        """An error event; the status was sent long ago."""
        error = orjson.loads(refusal_body("completion", 500, self.problem, "INTERNAL_SERVER_ERROR", None))
        return b"data: " + orjson.dumps({"error": error}) + b"\n\n" + DONE_EVENT

    def refusal(self) -> bytes:
        """Body of a status 500."""
        return refusal_body("completion", 500, self.problem, "InternalServerError", None)

    def whole(
        self, tokens: Sequence[int], finish: str, kv_transfer_params: dict[str, object] | None
    ) -> bytes:
        """Body of an answer that is not streamed."""
        head, text = self._head, detokenize(tokens)
        choice: dict[str, object] = {"index": 0}
        if head.api == "completion":
            choice["text"] = text
        else:
            choice["message"] = {
                "role": "assistant",
                "content": text,
                "reasoning_content": None,
                "tool_calls": None,
            }
        choice |= {"logprobs": None, **_end(finish)}
        if head.return_token_ids:
            choice["token_ids"] = list(tokens)
        counts = usage(len(head.prompt), len(tokens)) | {"prompt_tokens_details": None, "reasoning_tokens": 0}
        return orjson.dumps(
            {
                "id": head.id,
                "object": "text_completion" if head.api == "completion" else "chat.completion",
                "created": head.created,
                "model": head.model,
                "choices": [choice],
                "usage": counts,
                "metadata": {"weight_version": "default"},
            }
        )

    def _event(self, token: int, position: int, finish: str | None) -> bytes:
        head, text = self._head, f" t{token}"
        choice: dict[str, object] = {"index": 0}
        if head.api == "completion":
            choice["text"] = text
        else:
            choice["delta"] = {"role": None, "content": text, "reasoning_content": None, "tool_calls": None}
        choice |= {"logprobs": None, **_end(finish)}
        if head.return_token_ids:
            choice["token_ids"] = [token]
        counts = usage(len(head.prompt), position + 1) if head.continuous_usage else None
        return self._chunk([choice], counts)

    def _chunk(self, choices: list[dict[str, object]], counts: dict[str, int] | None) -> bytes:
        head = self._head
        body: dict[str, object] = {
            "id": head.id,
            "object": self._object,
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "usage": counts,
        }
        return b"data: " + orjson.dumps(body) + b"\n\n"


def _finish(reason: str, length: int) -> dict[str, object]:
    return (
        {"type": "length", "length": length} if reason == "length" else {"type": "stop", "matched": EOS_TOKEN}
    )


def _end(finish: str | None) -> dict[str, object]:
    return {"finish_reason": finish, "matched_stop": EOS_TOKEN if finish == "stop" else None}
