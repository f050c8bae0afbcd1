"""How to ask a stack for tokens: which prompts it takes, and the same greedy question by every way there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import orjson

from .evidence.naming import Finding, damaged
from .spec.topology import Kind, Role
from .stack.greedy import logprob_gap, probe
from .stack.launch import Stack
from .stack.pairs import probe_pair
from .stack.running import Serving

THROUGH_THE_ROUTER, ALONE = "through the router", " alone"
"""How a way to ask is called, and how the name ends where it is one engine by itself."""
EARLIER = "through the router, earlier in this launch"
"""What the same launch answered when it was asked before: with cells measured in between, before the load."""
GREEDY_LENGTHS = (64, 300)
"""Prompt tokens: below and above one block of the engines' usual block sizes (16 to 128 tokens)."""


def exact_form(forms: frozenset[str]) -> str | None:
    """The form in which prompts of exact length can be sent, None when only text gets through."""
    return next((form for form in ("token_ids", "generate_ids") if form in forms), None)


def prompt_vocabulary(model: str) -> tuple[int, int]:
    """Token ids that prompts may be drawn from: ordinary ones that the model has, by its config.json.

    Special tokens sit at either end of a vocabulary, so a quarter (at most 1000) is left out below, and ids
    from 30000 on are never needed. Without a local config.json the usual size of a vocabulary is assumed.
    """
    usual = 30_000
    try:
        config = orjson.loads((Path(model).expanduser() / "config.json").read_bytes())
        size = config.get("vocab_size") or config["text_config"]["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        size = usual
    return min(1000, size // 4), min(usual, size)


def greedy_prompt(length: int) -> tuple[int, ...]:
    """The fixed prompt of `length` tokens that every way is asked with."""
    return tuple(100 + (7 * i) % 1009 for i in range(length))


def parts_at_a_tie(
    stack: Serving, length: int, a: Sequence[int], b: Sequence[int], limit_nats: float
) -> bool:
    """Whether two greedy answers to that prompt part where their tokens are nearly as likely, for engines that are not
    stable to the bit. Asks the stack, once, and only where a difference is allowed at all.
    """
    if limit_nats <= 0:
        return False
    gap = logprob_gap(stack.url, stack.model, greedy_prompt(length), a, b)
    return gap is not None and gap <= limit_nats


def difference(stack: Serving, length: int, answers: Mapping[str, Sequence[int]], limit_nats: float) -> str:
    """Which ways answer otherwise than the router does now, and the fault behind it; empty when they all agree.

    Within `limit_nats` a difference is allowed (`parts_at_a_tie`).
    """
    expected = answers[THROUGH_THE_ROUTER]
    different = {
        place: tokens
        for place, tokens in answers.items()
        if tokens != expected and not parts_at_a_tie(stack, length, expected, tokens, limit_nats)
    }
    if not different:
        return ""
    damage = kv_damage(answers)
    cause = f"\ncause: {damage.line}" if damage else ""
    return f"{length} prompt tokens: router says {expected}, but {different}{cause}"


def greedy_problem(
    stack: Serving, ask: Callable[[int], Mapping[str, Sequence[int]]], count: int, limit_nats: float
) -> str:
    """What is wrong with the greedy answers of a stack, prompt length by prompt length; empty when nothing is.

    `ask` gives the answers of every way for one length; each must have `count` tokens. Raises what `ask` raises.
    """
    for length in GREEDY_LENGTHS:
        answers = ask(length)
        if counts := {way: len(tokens) for way, tokens in answers.items() if len(tokens) != count}:
            return f"{length} prompt tokens: {count} tokens were asked for, there came {counts}"
        if problem := difference(stack, length, answers, limit_nats):
            return problem
    return ""


def kv_damage(answers: Mapping[str, Sequence[int]]) -> Finding | None:
    """The fault behind greedy answers that differ over the KV transfer while all engines alone agree; else None.

    `answers` are those of `greedy_by_every_way`. Engines that cannot be asked alone leave it open.
    """
    alone = {place: tuple(tokens) for place, tokens in answers.items() if place.endswith(ALONE)}
    if not any(place.startswith(Role.DECODE.value) for place in alone) or len(set(alone.values())) != 1:
        return None
    same = tuple(answers[THROUGH_THE_ROUTER]) in alone.values()
    return None if same else damaged()


def greedy_by_every_way(stack: Stack, length: int, count: int) -> dict[str, tuple[int, ...]]:
    """Way -> the first `count` greedy tokens for one fixed prompt of `length` tokens.

    Besides the router that is each engine alone or, where a role cannot serve alone (SGLang), each pair directly.
    Raises ProbeError when a way gives no answer.
    """
    prompt = greedy_prompt(length)
    form = exact_form(stack.plan.prompt_forms()) or "token_ids"
    answers = {THROUGH_THE_ROUTER: probe(stack.url, stack.model, prompt, count, form=form)}
    if form == "generate_ids" and stack.plan.topology.kind is Kind.PD:
        for prefill in stack.plan.of_role(Role.PREFILL):
            for decode in stack.plan.of_role(Role.DECODE):
                place = f"{prefill.id} to {decode.id} directly"
                answers[place] = probe_pair(stack.plan, prefill, decode, prompt, count)
    else:
        for name, url in stack.role_urls.items():
            answers[f"{name}{ALONE}"] = probe(url, stack.model, prompt, count, form=form)
    return answers
