"""What makes two measurements comparable: the hard keys of a baseline, and what to say when they differ."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from pydantic import BaseModel, ConfigDict, Field


def digest_of(content: object, length: int = 16) -> str:
    """Short SHA-256 of a JSON-like value, independent of key order."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


class BaselineKey(BaseModel):
    """The hard keys: numbers are compared only where every one of these is equal.

    Engine version, commit, driver and host are not here: they are what is under test, or what a launch may
    vary over.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    gpu: str = Field(min_length=1)
    """Model name as the driver gives it, `cpu`, or `none` for a simulated engine."""
    gpu_count: int = Field(ge=0)
    link: str
    """How the GPUs and roles reach each other and KV moves, e.g. `nvlink/rdma`."""
    engine: str = Field(min_length=1)
    model: str = Field(min_length=1)
    dtype: str
    topology: str = Field(min_length=1)
    topology_digest: str
    definitions: str
    """Version of the client's metric definitions."""
    simulated: bool

    @property
    def digest(self) -> str:
        """Eight hex digits that stand for this key inside a file."""
        return digest_of(self.model_dump(), 8)

    @property
    def place(self) -> PurePosixPath:
        """`<gpu>x<n>/<engine>/<model>/<topology>` without suffix, safe as a relative path."""
        return PurePosixPath(
            f"{slug(self.gpu)}x{self.gpu_count}", slug(self.engine), slug(self.model), slug(self.topology)
        )

    def differences(self, other: BaselineKey) -> tuple[str, ...]:
        """`gpu: 'H100' is not 'H200'` for every hard key in which `other` (the stored one) differs from
        this one.
        """
        mine, theirs = self.model_dump(), other.model_dump()
        return tuple(
            f"{name}: stored {theirs[name]!r}, now {mine[name]!r}"
            for name in mine
            if mine[name] != theirs[name]
        )


@dataclass(frozen=True, slots=True)
class CellRef:
    """A cell of a workload, with a digest of what it sends: another load under the same name is not
    comparable.
    """

    workload: str
    cell: str
    digest: str

    @property
    def id(self) -> str:
        """`fixed-shapes/in512-out256-c16`: the cell's name in a baseline file."""
        return f"{self.workload}/{self.cell}"

    @property
    def level(self) -> str:
        """`c16`: the last part of the cell's name, which says how much load it is."""
        return self.cell.rpartition("-")[2]

    @classmethod
    def parse(cls, cell_id: str, digest: str) -> CellRef:
        """Inverse of `id`."""
        workload, _, cell = cell_id.partition("/")
        return cls(workload, cell, digest)


def slug(text: str) -> str:
    """Turn a model or GPU name into one path component; never empty, never `..`."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", text.strip()).strip("-.").lower()
    return clean or digest_of(text, 8)
