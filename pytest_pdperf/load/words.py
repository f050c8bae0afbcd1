"""Text for servers that take no token ids, without a tokenizer: one short word for each id."""

from __future__ import annotations

from collections.abc import Sequence

_SYLLABLES = ["ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo", "xu", "za"]
WORDS = tuple(a + b for a in _SYLLABLES for b in _SYLLABLES)


def text_of(tokens: Sequence[int]) -> str:
    """Text stand-in for a token-id prompt where a server takes only text (chat): one short word a token.

    How many tokens the server makes of it is *its* answer; the client checks that against the plan.
    """
    size = len(WORDS)
    return " ".join(WORDS[(token * 2654435761 >> 8) % size] for token in tokens)
