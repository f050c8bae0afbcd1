"""A model is known by what its folder holds, not by where it lies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pytest_pdperf.evidence.model_identity import model_digest, model_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "qwen"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"header" + bytes(100))
    (folder / "README.md").write_text("words")
    return folder


def test_a_copy_elsewhere_is_the_same_model_whatever_is_said_about_it(model: Path, tmp_path: Path) -> None:
    digest = model_digest(str(model))
    assert len(digest) == 12
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("other words")
    assert model_digest(str(tmp_path / "copy")) == digest


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b'{"hidden_size": 16}'),
        ("tokenizer.json", b"{ }"),
        ("model.safetensors", b"header" + bytes(101)),
        ("model.safetensors", b"Header" + bytes(100)),
        ("model-2.safetensors", b""),
    ],
)
def test_another_config_tokenizer_or_checkpoint_is_another_model(
    model: Path, name: str, content: bytes
) -> None:
    digest = model_digest(str(model))
    (model / name).write_bytes(content)
    assert model_digest(str(model)) != digest


def test_a_name_is_looked_up_in_hugging_faces_cache_where_contents_name_the_files(
    model: Path, tmp_path: Path
) -> None:
    cached = tmp_path / "hub" / "models--Qwen--Qwen3-8B"
    snapshot = cached / "snapshots" / "abc"
    shutil.copytree(model, snapshot)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc\n")
    environ = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    assert model_folder("Qwen/Qwen3-8B", environ) == snapshot
    assert model_folder("Qwen/Qwen3-8B", {"HF_HOME": str(tmp_path)}) == snapshot
    (cached / "blobs").mkdir()
    digests = set()
    for blob in ("0a", "0b"):
        (snapshot / "model.safetensors").unlink()
        (cached / "blobs" / blob).write_bytes(b"header" + bytes(100))
        (snapshot / "model.safetensors").symlink_to(cached / "blobs" / blob)
        digests.add(model_digest("Qwen/Qwen3-8B", environ))
    assert len(digests) == 2


@pytest.mark.parametrize("model", ["fast", "Qwen/Qwen3-8B", "", "/no/such/folder"])
def test_what_is_not_here_has_no_digest(model: str, tmp_path: Path) -> None:
    assert model_digest(model, {"HOME": str(tmp_path)}) == ""
