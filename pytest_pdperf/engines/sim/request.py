"""What a client may ask for: request bodies checked the way vLLM checks them, unsupported wishes refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from .stream import Api
from .tokens import tokenize

_NOT_SIMULATED = ("stop", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "tools", "use_beam_search")


class Refused(Exception):
    """A request that is answered with an error object before it reaches the engine."""

    def __init__(
        self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param


@dataclass(frozen=True, slots=True)
class Wanted:
    """One checked request."""

    api: Api
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    kv: Mapping[str, object]
    """`kv_transfer_params`, empty when there are none."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine was started with."""

    served_model: str
    max_model_len: int
    vocabulary: int


def parse_request(api: Api, raw: bytes, limits: Limits) -> Wanted:
    """Check one body; raises Refused with vLLM's status and wording."""
    body = parse_object(raw)
    check_model(body, limits)
    for name in _NOT_SIMULATED:
        if body.get(name) not in (None, False, [], 0):
            raise Refused(400, f"The simulated engine does not support {name!r}.", param=name)
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise Refused(400, f"The simulated engine supports only {name}=1.", param=name)
    if api == "completion":
        prompt = _prompt_tokens(body.get("prompt"), limits)
        max_tokens = _count(body, "max_tokens", 16)
    else:
        prompt = _chat_tokens(body.get("messages"), limits)
        asked = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        max_tokens = _count(body, asked, max(1, limits.max_model_len - len(prompt)))
    if len(prompt) + max_tokens > limits.max_model_len:
        raise Refused(
            400,
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested "
            f"{max_tokens} output tokens and your prompt contains {len(prompt)} input tokens, for a total of "
            f"{len(prompt) + max_tokens} tokens. Please reduce the length of the input prompt or the number of "
            f"requested output tokens.",
            param="input_tokens",
        )
    min_tokens = _count(body, "min_tokens", 0, lowest=0)
    if min_tokens > max_tokens:
        raise Refused(
            400, f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
        )
    options = body.get("stream_options") or {}
    stream = body.get("stream") is True
    if options and not stream:
        raise Refused(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
    if not isinstance(options, dict):
        raise Refused(400, "stream_options must be an object.", param="stream_options")
    kv = body.get("kv_transfer_params") or {}
    if not isinstance(kv, dict):
        raise Refused(400, "kv_transfer_params must be an object.", param="kv_transfer_params")
    return Wanted(
        api=api,
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=body.get("ignore_eos") is True,
        stream=stream,
        include_usage=options.get("include_usage") is True,
        continuous_usage=options.get("continuous_usage_stats") is True
        and options.get("include_usage") is True,
        return_token_ids=body.get("return_token_ids") is True,
        kv=kv,
    )


def parse_object(raw: bytes) -> dict[str, object]:
    """The JSON object of a body; Refused (400) for anything else."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as problem:
        raise Refused(400, f"Invalid JSON body: {problem}") from None
    if not isinstance(body, dict):
        raise Refused(400, "The body must be a JSON object.")
    return body


def check_model(body: Mapping[str, object], limits: Limits) -> None:
    """Refused (404) for a model that is not served; no model at all is fine, as with vLLM."""
    model = body.get("model")
    if model not in (None, "", limits.served_model):
        raise Refused(404, f"The model `{model}` does not exist.", "NotFoundError", param="model")


def tokens_of(body: Mapping[str, object], limits: Limits) -> tuple[int, ...]:
    """The tokens of a /tokenize body, from `prompt` or `messages`."""
    if "messages" in body:
        return _chat_tokens(body.get("messages"), limits)
    return _prompt_tokens(body.get("prompt"), limits)


def _prompt_tokens(prompt: object, limits: Limits) -> tuple[int, ...]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        tokens = tuple(tokenize(prompt, limits.vocabulary))
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        tokens = tuple(prompt)
    elif isinstance(prompt, list):
        raise Refused(400, "The simulated engine takes one prompt a request.", param="prompt")
    else:
        raise Refused(400, "Either prompt or prompt_embeds must be provided.", param="prompt")
    if not tokens:
        raise Refused(400, "The decoder prompt cannot be empty", param="prompt")
    if min(tokens) < 0 or max(tokens) >= limits.vocabulary:
        worst = max(tokens) if max(tokens) >= limits.vocabulary else min(tokens)
        raise Refused(400, f"Token id {worst} is out of vocabulary", param="prompt")
    return tokens


def _chat_tokens(messages: object, limits: Limits) -> tuple[int, ...]:
    """Chat template of the simulator: the words `<|role|>`, then those of the content, at the end `<|assistant|>`."""
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages must be a list of messages, not empty.", param="messages")
    words: list[str] = []
    for message in messages:
        if not isinstance(message, dict):
            raise Refused(400, "each message must be an object.", param="messages")
        content = message.get("content") or ""
        if isinstance(content, list):
            content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        words += [f"<|{message.get('role', 'user')}|>", str(content)]
    return tuple(tokenize(" ".join([*words, "<|assistant|>"]), limits.vocabulary))


def _count(body: Mapping[str, object], name: str, default: int, lowest: int = 1) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < lowest:
        raise Refused(400, f"{name} must be at least {lowest}, got {value!r}.", param=name)
    return value
