"""Two runs of "the same model" may differ in a config or a checkpoint: a digest tells, without reading all weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_TEXTS = frozenset({".json", ".jinja", ".model", ".txt"})
_HEADER_BYTES = 1 << 20
"""Of a weight file: safetensors keeps the name, type, shape and place of each tensor at its start."""


def model_digest(model: str, environ: Mapping[str, str] | None = None) -> str:
    """Twelve hex digits of what a model is; empty when its files are not on this machine.

    They cover names and contents of configuration and tokenizer, and of each weight file its name, size and first MiB:
    another architecture, tokenizer, precision or sharding is another digest. Weights that differ in their values alone
    are told apart where the folder comes from Hugging Face's cache, whose files are named by their content.
    """
    folder = model_folder(model, os.environ if environ is None else environ)
    if folder is None:
        return ""
    digest = hashlib.sha256()
    try:
        for part in _parts(folder):
            digest.update(len(part).to_bytes(8) + part)
    except OSError:
        return ""
    return digest.hexdigest()[:12]


def model_folder(model: str, environ: Mapping[str, str]) -> Path | None:
    """Where a model's files lie: the folder itself, or what Hugging Face's cache holds under that name; else None."""
    if not model:
        return None
    folder = Path(model)
    if (folder / "config.json").is_file():
        return folder
    home = Path(environ.get("HF_HOME") or Path(environ.get("HOME", "/")) / ".cache" / "huggingface")
    cached = Path(environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{model.replace('/', '--')}"
    try:
        revision = (cached / "refs" / "main").read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    snapshot = cached / "snapshots" / revision
    return snapshot if (snapshot / "config.json").is_file() else None


def _parts(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.suffix not in _WEIGHTS | _TEXTS:
            continue
        yield path.name.encode()
        if path.suffix in _TEXTS:
            yield path.read_bytes()
            continue
        yield str(path.stat().st_size).encode()
        if path.is_symlink() and path.resolve().parent.name == "blobs":
            yield path.resolve().name.encode()
            continue
        with path.open("rb") as file:
            yield file.read(_HEADER_BYTES)
