"""Asks a server for a few greedy tokens: proof that it serves, and a probe for silent KV corruption."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import httpx

from pytest_pdperf.stack.access import Access


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request; `error` is empty only when every requested token came."""

    id: str = ""
    tokens: tuple[int, ...] = ()
    """Empty when the server names no token ids."""
    text: str = ""
    completion_tokens: int | None = None
    error: str = ""
    kv_transfer_params: Mapping[str, object] | None = None


class ProbeError(Exception):
    """A probe request failed: one line with the URL and what came instead of the tokens."""


def client(timeout_s: float = 5.0, *, keep_alive: bool = True) -> httpx.Client:
    """An HTTP client for loopback: no proxies, no environment, and no certificates (reading them takes a while).

    Without `keep_alive` every request has a connection of its own, whose first answer the kernel acknowledges at once.
    """
    limits = httpx.Limits(max_connections=100, max_keepalive_connections=20 if keep_alive else 0)
    return httpx.Client(trust_env=False, timeout=timeout_s, verify=False, limits=limits)


def body_of(
    model: str, prompt_ids: Sequence[int], n: int, *, form: str, stream: bool
) -> tuple[str, dict[str, object]]:
    """(path, JSON body) of a greedy request for exactly `n` tokens in one of the prompt forms."""
    if form == "generate_ids":
        params = {"temperature": 0.0, "max_new_tokens": n, "ignore_eos": True}
        return "/generate", {"input_ids": list(prompt_ids), "sampling_params": params, "stream": stream}
    prompt: object = list(prompt_ids) if form == "token_ids" else " ".join(str(i) for i in prompt_ids)
    body: dict[str, object] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": n,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    return "/v1/completions", body


def ask(
    http: httpx.Client,
    url: str,
    path: str,
    body: Mapping[str, object],
    *,
    want: int,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send one request and judge the answer by what it holds, not by its status.

    `want` is the number of tokens that must come. Never raises for what a server or the network does.
    """
    try:
        if body.get("stream"):
            with http.stream("POST", url + path, json=body, timeout=timeout_s, headers=headers) as response:
                if response.status_code != 200:
                    response.read()
                    return Answer(error=_refusal(response))
                answer = _from_stream(response.iter_lines())
        else:
            response = http.post(url + path, json=body, timeout=timeout_s, headers=headers)
            if response.status_code != 200:
                return Answer(error=_refusal(response))
            answer = _from_body(response.json())
    except httpx.TimeoutException:
        return Answer(error=f"no answer from {url}{path} within {timeout_s:g} s")
    except (httpx.HTTPError, ValueError) as error:
        return Answer(error=f"{url}{path}: {type(error).__name__}: {error}")
    if not answer.error and answer.completion_tokens not in (None, want):
        return Answer(id=answer.id, error=f"{answer.completion_tokens} tokens came instead of {want}")
    if not answer.error and answer.completion_tokens is None and not (answer.tokens or answer.text):
        return Answer(id=answer.id, error="an answer without any token")
    return answer


def probe(
    url: str,
    model: str,
    prompt_ids: Sequence[int],
    n: int,
    *,
    form: str = "token_ids",
    timeout_s: float = 120.0,
    access: Access | None = None,
) -> tuple[int, ...]:
    """The first `n` greedy tokens for a prompt, to compare one deployment's answer with another's.

    `access` is for a server that is not ours. Raises ProbeError when the request fails or the server names no token
    ids.
    """
    path, body = body_of(model, prompt_ids, n, form=form, stream=False)
    with access.client() if access is not None else client() as http:
        answer = ask(http, url, path, body, want=n, timeout_s=timeout_s)
    if answer.error:
        raise ProbeError(f"probe at {url}: {answer.error}")
    if len(answer.tokens) != n:
        raise ProbeError(f"probe at {url}: {len(answer.tokens)} token ids for {n} tokens")
    return answer.tokens


def logprob_gap(
    url: str,
    model: str,
    prompt_ids: Sequence[int],
    a: Sequence[int],
    b: Sequence[int],
    *,
    timeout_s: float = 120.0,
) -> float | None:
    """How much likelier the server finds one of two greedy answers than the other where they part, in nats.

    Asks for the distribution of the one token after the prompt and what both answers share. Near 0 the two tokens are
    a tie, which rounding decides in an engine that is not stable to the bit; damaged KV gives no such tie. None where
    the answers do not part, or the server does not list both tokens among its 20 likeliest. Raises ProbeError when the
    request fails.
    """
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if place is None:
        return None
    path, body = body_of(model, [*prompt_ids, *a[:place]], 1, form="token_ids", stream=False)
    body |= {"logprobs": 20, "return_tokens_as_token_ids": True}
    with client() as http:
        try:
            response = http.post(url + path, json=body, timeout=timeout_s)
            if response.status_code != 200:
                raise ProbeError(f"logprobs at {url}: {_refusal(response)}")
            listed = response.json()["choices"][0]["logprobs"]["top_logprobs"][0]
        except httpx.HTTPError as error:
            raise ProbeError(f"logprobs at {url}: {type(error).__name__}: {error}") from None
        except (ValueError, LookupError, TypeError):
            return None
    both = [listed.get(f"token_id:{answer[place]}") for answer in (a, b)]
    known = [float(value) for value in both if isinstance(value, int | float)]
    return abs(known[0] - known[1]) if len(known) == 2 else None


def _refusal(response: httpx.Response) -> str:
    return f"HTTP {response.status_code} from {response.url}: {' '.join(response.text.split())[:300]}"


def _from_body(data: object) -> Answer:
    if isinstance(data, list):
        data = data[0] if data else {}
    if not isinstance(data, Mapping):
        return Answer(error=f"not an answer: {str(data)[:200]}")
    return _join([data])


def _from_stream(lines: Iterator[str]) -> Answer:
    events: list[Mapping[str, object]] = []
    for line in lines:
        value = line.removeprefix("data:").strip()
        if line.startswith("data:") and value and value != "[DONE]":
            event = json.loads(value)
            if isinstance(event, Mapping):
                events.append(event)
    return _join(events)


def _join(events: Sequence[Mapping[str, object]]) -> Answer:
    id, text, count, kv = "", "", None, None
    tokens: list[int] = []
    for event in events:
        if event.get("error"):
            return Answer(id=id, error=f"error in the answer: {json.dumps(event['error'])[:300]}")
        id = id or str(event.get("id", ""))
        usage, meta = event.get("usage"), event.get("meta_info")
        if isinstance(usage, Mapping) and isinstance(usage.get("completion_tokens"), int):
            count = cast(int, usage["completion_tokens"])
        if isinstance(meta, Mapping):
            id = id or str(meta.get("id", ""))
            if isinstance(meta.get("completion_tokens"), int):
                count = cast(int, meta["completion_tokens"])
        params = event.get("kv_transfer_params")
        kv = params if isinstance(params, Mapping) else kv
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            text += str(choice.get("text") or "")
            tokens += [int(t) for t in choice.get("token_ids") or ()]
        if "output_ids" in event and isinstance(event["output_ids"], list):
            new, said = [int(t) for t in event["output_ids"]], str(event.get("text", ""))
            # As many ids as the count says are all so far; fewer are what is new (--incremental-streaming-output).
            tokens, text = (new, said) if count in (None, len(new)) else (tokens + new, text + said)
    return Answer(id, tuple(tokens), text, count, "", kv)
