"""Prompts of exact length that no prefix cache has seen, and that are the same for every topology.

A prompt is a list of token ids, so no tokenizer can change its length. Ids are drawn by a generator keyed
with (seed, salt, stream name); the salt names workload, cell and run but never the topology, so that pairs
match.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.trace import BLOCK_TOKENS, TraceRequest
from pytest_pdperf.spec.workload import Cell, Stream


def generator(*key: object) -> np.random.Generator:
    """Random generator for a purpose: equal keys give equal draws on every machine and in every process."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in key).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))


def prompts_for(
    stream: Stream, *, seed: int, salt: str, vocab: tuple[int, int], lengths: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Token-id prompts of a stream, one a request, each of its exact planned length.

    Lengths are drawn uniformly from `stream.input_tokens` (both ends included) unless `lengths` gives them.
    The first tokens of any two prompts of the list differ - the first token alone while the vocabulary lasts,
    else the shortest prefix that can - so even a cache with one-token pages has nothing to share. Raises
    UsageProblem when prompts are too short to be told apart with this vocabulary.
    """
    rng = generator("prompts", seed, salt, stream.name)
    count = stream.requests if lengths is None else len(lengths)
    low, high = stream.input_tokens
    sizes = (
        rng.integers(low, high + 1, size=count) if lengths is None else np.asarray(lengths, dtype=np.int64)
    )
    first, last = vocab
    span = last - first
    head = _distinct_heads(rng, count, span, int(sizes.min()) if count else 1, stream.name)
    prompts = []
    for i in range(count):
        tokens = rng.integers(0, span, size=int(sizes[i]))
        tokens[: head.shape[1]] = head[i]
        prompts.append(tuple((tokens + first).tolist()))
    return tuple(prompts)


def _distinct_heads(
    rng: np.random.Generator, count: int, span: int, shortest: int, name: str
) -> NDArray[np.int64]:
    """`count` different rows of as few tokens (0..span-1) as can differ; shape (count, k)."""
    k = 1
    while span**k < count:
        k += 1
    if k > shortest:
        raise UsageProblem(
            f"stream {name!r}: {count} prompts of {shortest} tokens cannot all differ with {span} token ids; "
            f"use at least {k} input tokens, fewer requests or a larger vocab"
        )
    if span**k <= 4 * count or span**k < 2**20:
        codes = rng.permutation(span**k)[:count].astype(np.int64)
    else:
        drawn: dict[int, None] = {}
        while len(drawn) < count:
            drawn.update(dict.fromkeys(rng.integers(0, min(span**k, 2**62), size=count).tolist()))
        codes = np.asarray(list(drawn)[:count], dtype=np.int64)
    columns = [(codes // span**i) % span for i in range(k)]
    return np.stack(columns, axis=1) if count else np.zeros((0, k), dtype=np.int64)


def trace_prompt(request: TraceRequest, *, seed: int, salt: str, vocab: tuple[int, int]) -> tuple[int, ...]:
    """Prompt of a traced request with `hash_ids`: blocks of one id are equal within a run, not between runs."""
    low, high = vocab
    tokens: list[int] = []
    for block in request.hash_ids:
        drawn = generator("trace-block", seed, salt, block).integers(low, high, size=BLOCK_TOKENS)
        tokens.extend(drawn.tolist())
    return tuple(tokens[: request.input_tokens])


def check_context(cell: Cell, max_context: int | None, longest: int | None = None) -> None:
    """Refuse a cell whose longest request cannot fit, before anything is sent.

    `longest` overrides the cell's own bound (a replayed trace brings its lengths with it). Raises
    UsageProblem.
    """
    need = cell.max_context if longest is None else longest
    if max_context is not None and need > max_context:
        raise UsageProblem(
            f"workload {cell.workload!r} cell {cell.id!r}: up to {need} tokens of prompt plus output do not "
            f"fit the server's context of {max_context}; raise max_model_len to {need} or choose a shorter shape"
        )
