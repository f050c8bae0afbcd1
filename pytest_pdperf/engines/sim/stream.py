"""The bytes of an answer: vLLM's JSON for completions and chat, prepared so that one token is one format call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import orjson

from .tokens import detokenize

Api = Literal["completion", "chat"]
DONE_EVENT = b"data: [DONE]\n\n"
FINGERPRINT = "pdperf-simulated"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every event of one answer repeats, and what the client asked to see in it."""

    api: Api
    id: str
    created: int
    model: str
    prompt: Sequence[int]
    return_token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


def error_body(status: int, message: str, kind: str, param: str | None = None) -> bytes:
    """vLLM's error object."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})


INTERNAL_ERROR = error_body(500, "Internal server error", "InternalServerError")


def usage(prompt: int, completion: int) -> dict[str, int]:
    """The usage object of a stream's events."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


class Writer(Protocol):
    """The bytes of one answer in some API: as events while it grows, or whole."""

    def opening(self) -> bytes:
        """What comes before any token."""

    def first(self, token: int) -> bytes:
        """The event of the first token."""

    def token(self, token: int, position: int) -> bytes:
        """The event of a token that is neither first nor last."""

    def last(self, token: int, position: int, finish: str) -> bytes:
        """The event of the last token."""

    def final(self, completion: int) -> bytes:
        """What comes after the last token."""

    def error(self) -> bytes:
        """What ends an answer already begun, when the request fails."""

    def refusal(self) -> bytes:
        """Body of the status 500 that a request gets instead of an answer."""

    def whole(
        self, tokens: Sequence[int], finish: str, kv_transfer_params: dict[str, object] | None
    ) -> bytes:
        """Body of an answer that is not streamed."""


class EventWriter:
    """Server-sent events of one answer. `token` is the hot path; everything constant is rendered up front."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._prompt_tokens = len(head.prompt)
        object_name = "text_completion" if head.api == "completion" else "chat.completion.chunk"
        names = f'"id":{_json(head.id)},"object":"{object_name}"'
        start = f'{{{names},"created":{head.created},"model":{_json(head.model)},'
        self._open = start
        field = '"text":"' if head.api == "completion" else '"delta":{"content":"'
        close = '"' if head.api == "completion" else '"}'
        self._before = f'data: {start}"choices":[{{"index":0,{field} t'
        self._between = f'{close},"logprobs":null,"finish_reason":'
        ids = '"token_ids":[%d]' if head.return_token_ids else '"token_ids":null'
        if head.api == "completion":
            plain_tail = f'null,"stop_reason":null,"prompt_token_ids":null,{ids}}}]'
        else:
            plain_tail = f"null,{ids}}}]"
        plain = _escape(self._before) + "%d" + _escape(self._between) + plain_tail
        self._plain = f"{plain}}}\n\n".encode()
        self._with_ids = head.return_token_ids
        self._simple = not head.continuous_usage

    def token(self, token: int, position: int) -> bytes:
        """The event of a token that is neither first nor last."""
        if self._simple:
            return self._plain % ((token, token) if self._with_ids else token)
        return self._full(token, position, None)

    def opening(self) -> bytes:
        """What comes before any token: chat's event that carries only the role, nothing for completions."""
        return self._role() if self._head.api == "chat" else b""

    def first(self, token: int) -> bytes:
        """The event of the first token."""
        return self._full(token, 0, None)

    def last(self, token: int, position: int, finish: str) -> bytes:
        """The event of the last token."""
        return self._full(token, position, finish)

    def final(self, completion: int) -> bytes:
        """The usage event, when asked for, and the end mark."""
        if not self._head.include_usage:
            return DONE_EVENT
        text = orjson.dumps(usage(self._prompt_tokens, completion)).decode()
        event = f'data: {self._open}"choices":[],"usage":{text},"system_fingerprint":"{FINGERPRINT}"}}\n\n'
        return event.encode() + DONE_EVENT

    @staticmethod
    def error() -> bytes:
        """What vLLM sends into an answer already begun, when the request fails."""
        return b"data: " + INTERNAL_ERROR + b"\n\n" + DONE_EVENT

    @staticmethod
    def refusal() -> bytes:
        """Body of a status 500."""
        return INTERNAL_ERROR

    def whole(
        self, tokens: Sequence[int], finish: str, kv_transfer_params: dict[str, object] | None
    ) -> bytes:
        """Body of an answer that is not streamed."""
        return whole_answer(self._head, tokens, finish, kv_transfer_params)

    def _role(self) -> bytes:
        prompt = ""
        if self._head.return_token_ids:
            prompt = (
                f',"prompt_token_ids":{orjson.dumps(list(self._head.prompt)).decode()},"prompt_text":null'
            )
        return (
            f'data: {self._open}"choices":[{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,'
            f'"finish_reason":null}}]{prompt}}}\n\n'
        ).encode()

    def _full(self, token: int, position: int, finish: str | None) -> bytes:
        head = self._head
        reason = f'"{finish}"' if finish else "null"
        ids = f"[{token}]" if head.return_token_ids else "null"
        if head.api == "completion":
            show_prompt = position == 0 and head.return_token_ids
            prompt = orjson.dumps(list(head.prompt)).decode() if show_prompt else "null"
            tail = f'{reason},"stop_reason":null,"prompt_token_ids":{prompt},"token_ids":{ids}}}]'
        else:
            stop = ',"stop_reason":null' if finish else ""
            tail = f'{reason}{stop},"token_ids":{ids}}}]'
        spent = ""
        if head.continuous_usage:
            spent = f',"usage":{orjson.dumps(usage(self._prompt_tokens, position + 1)).decode()}'
        return f"{self._before}{token}{self._between}{tail}{spent}}}\n\n".encode()


def whole_answer(
    head: AnswerHead, tokens: Sequence[int], finish: str, kv_transfer_params: dict[str, object] | None
) -> bytes:
    """The body of an answer that was not streamed."""
    prompt_ids = list(head.prompt) if head.return_token_ids else None
    choice: dict[str, object] = {"index": 0}
    text = detokenize(tokens)
    if head.api == "completion":
        choice["text"] = text
    else:
        choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
    choice |= {"logprobs": None, "finish_reason": finish, "stop_reason": None}
    choice["token_ids"] = list(tokens) if head.return_token_ids else None
    body: dict[str, object] = {
        "id": head.id,
        "object": "text_completion" if head.api == "completion" else "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [choice],
    }
    if head.api == "completion":
        choice |= {"prompt_logprobs": None, "prompt_token_ids": prompt_ids}
    else:
        body |= {"prompt_logprobs": None, "prompt_token_ids": prompt_ids}
    counted = usage(len(head.prompt), len(tokens))
    return orjson.dumps(
        body
        | {
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": counted | {"prompt_tokens_details": None, "completion_tokens_details": None},
            "kv_transfer_params": kv_transfer_params,
        }
    )


def _json(text: str) -> str:
    return orjson.dumps(text).decode()


def _escape(text: str) -> str:
    return text.replace("%", "%%")
