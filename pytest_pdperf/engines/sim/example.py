"""vLLM's ExampleConnector: prefill leaves the KV of a prompt in a shared folder, decode finds it there by its tokens.

Requests carry nothing. Only whole blocks are stored, so decode computes the end of every prompt itself, and a prompt
of less than a block is computed there altogether. What is stored stands for the KV: the digest of the tokens it is of.
A dropped transfer is a prompt that was not stored. vLLM loads within a step and holds all its requests up for that;
here only the request itself waits.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_pdperf.spec.roles import Role

from .answer import Answer
from .connector import Failures, Parts, Transfer
from .request import Wanted
from .side_channel import KvLoadError, Pulled
from .tokens import kv_digest

FILE = "simulated-kv"


def stored_tokens(prompt: int, block: int) -> int:
    """Tokens of a prompt that the connector stores: whole blocks, and at least one token is left to compute."""
    return (prompt - 1) // block * block


def sought_tokens(prompt: int, block: int) -> int:
    """Tokens that decode looks for: a token fewer counts, so that a prompt one past whole blocks is never found there.

    So it is in vLLM 0.32.
    """
    return max(0, prompt - 2) // block * block


class ExampleConnector:
    """Nobody counts transfers: the only traces are decode's prompt tokens by source and the files."""

    hit_source = "external_unspecified"
    prometheus = False

    def __init__(self, parts: Parts) -> None:
        assert parts.settings.shared_storage is not None, "the command line is checked for it"
        self._parts = parts
        self._folder = parts.settings.shared_storage
        self._block = parts.settings.profile.block_tokens

    async def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """No ports; the folder has to be there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._parts.log.info(f"Shared storage path is {self._folder}")

    def keeps(self, kv: Mapping[str, object]) -> bool:
        """Blocks are free as soon as the files are written."""
        return False

    def kept(self, answer: Answer) -> dict[str, object] | None:
        """Store the prompt before its answer is out, so that decode finds it."""
        prompt = answer.wanted.prompt
        stored = prompt[: stored_tokens(len(prompt), self._block)]
        if self._parts.settings.role is Role.PREFILL and not self._parts.drop_transfer.strikes():
            folder = self._folder_of(stored)
            folder.mkdir(exist_ok=True)
            (folder / FILE).write_bytes(kv_digest(stored))
        return None

    def transferred(self, key: object, end_s: float) -> None:
        """Never: files take no link of an engine."""

    def offered(self, wanted: Wanted) -> int:
        """Tokens of a stored beginning of this prompt."""
        tokens = sought_tokens(len(wanted.prompt), self._block)
        found = tokens and (self._folder_of(wanted.prompt[:tokens]) / FILE).is_file()
        if found:
            self._parts.log.info("External Cache Hit!")
        return tokens if found else 0

    async def fetch(self, wanted: Wanted) -> Pulled:
        """Read it. The time that takes is the link's for so many bytes, counted from now."""
        tokens = sought_tokens(len(wanted.prompt), self._block)
        prefix = wanted.prompt[:tokens]
        try:
            stored = (self._folder_of(prefix) / FILE).read_bytes()
        except OSError as problem:
            raise KvLoadError(f"stored KV cannot be read: {problem}", peer_lost=False) from None
        profile = self._parts.settings.profile
        size, now = tokens * profile.kv_bytes_per_token, self._parts.clock()
        self._parts.log.info(f"Inject KV cache of {tokens} tokens to the paged memory")
        whole = kv_digest(wanted.prompt) if stored == kv_digest(prefix) else kv_digest([*stored])
        ended = now + size / profile.links[self._parts.settings.link].rate(1)
        return Pulled(whole, tokens, size, now, ended)

    async def let_go(self, wanted: Wanted, *, fetched: bool) -> None:
        """Files stay: the next request with this prompt finds them too."""

    def failed(self, request_id: str, problem: KvLoadError) -> str:
        """No counter tells; vLLM's own engine would end here."""
        return f"loading the KV of request {request_id} failed: {problem}"

    def window(self, rows: Sequence[Transfer], failures: Failures) -> str | None:
        """This connector logs none."""
        return None

    def _folder_of(self, tokens: Sequence[int]) -> Path:
        return self._folder / hashlib.md5(array("q", tokens).tobytes(), usedforsecurity=False).hexdigest()
