"""What a model's own config.json says about it, for engines that take their limits from there."""

from __future__ import annotations

from pathlib import Path

import orjson


def longest_context(model: str) -> int | None:
    """Prompt and output together, in tokens, that a model was made for; None for one that is not a local folder.

    None too where positions are scaled: how far that reaches is for each engine to say.
    """
    try:
        found = orjson.loads((Path(model) / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    config = found.get("text_config", found) if isinstance(found, dict) else None
    if not isinstance(config, dict) or config.get("rope_scaling"):
        return None
    length = config.get("max_position_embeddings")
    return length if type(length) is int and length > 0 else None
