"""Deterministic greedy tokens: equal tokens from two systems prove that both decoded from the KV of one prompt."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence

EOS_TOKEN = 151_645
"""End of sequence in the vocabulary of the Qwen family; drawn like any other token."""


def kv_digest(prompt: Sequence[int]) -> bytes:
    """What stands for the KV cache of a prompt: 16 bytes that any other prompt changes."""
    return hashlib.blake2b(array("q", prompt).tobytes(), digest_size=16).digest()


def continuation(digest: bytes, length: int, vocabulary: int) -> list[int]:
    """The `length` tokens that greedy decoding gives after the KV `digest`: token i is a hash of (digest, i)."""
    words = array("I", hashlib.shake_128(digest).digest(4 * length))
    if sys.byteorder == "big":
        words.byteswap()
    return [word % vocabulary for word in words]


def tokenize(text: str, vocabulary: int) -> list[int]:
    """One token a whitespace-separated word.

    `t123` is token 123 (so the text of a completion gives back its ids), any other word a hash of itself.
    """
    return [_word(word, vocabulary) for word in text.split()]


def detokenize(tokens: Iterable[int]) -> str:
    """Text of a completion: ` t123 t7`; a token's own text is ` t123`, with the space in front."""
    return "".join(f" t{token}" for token in tokens)


def _word(word: str, vocabulary: int) -> int:
    digits = word[1:]
    if (
        word[0] == "t"
        and digits.isascii()
        and digits.isdigit()
        and len(digits) < 8
        and int(digits) < vocabulary
    ):
        return int(digits)
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little") % vocabulary
