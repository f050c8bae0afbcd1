"""One request inside one engine, from the queue to its last token, and the step that moves it on."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class State(IntEnum):
    """Where a sequence stands."""

    NEW = 0
    QUEUED = 1
    RUNNING = 2
    HELD = 3
    DONE = 4
    CANCELLED = 5


class Sequence:
    """One request inside one engine.

    `kv_ready` marks a prompt whose KV is already in this engine's blocks, `loaded` one whose first so many tokens come
    without computing once it is scheduled; `hold` keeps the blocks after the last
    token until `StepScheduler.release` (a prefill engine waiting for decode to fetch them).
    """

    __slots__ = (
        "blocks",
        "computed",
        "first_step",
        "hold",
        "kv_ready",
        "leaks",
        "max_tokens",
        "payload",
        "prompt_tokens",
        "queued_s",
        "scheduled_s",
        "state",
    )

    def __init__(
        self,
        prompt_tokens: int,
        max_tokens: int,
        *,
        kv_ready: bool = False,
        loaded: int = 0,
        hold: bool = False,
        leaks: bool = False,
        payload: object = None,
    ) -> None:
        if prompt_tokens < 1 or max_tokens < 1:
            raise ValueError(
                f"a sequence needs a prompt and an output, got {prompt_tokens}/{max_tokens} tokens"
            )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.kv_ready = kv_ready
        self.hold = hold
        self.leaks = leaks
        self.payload = payload
        self.computed = prompt_tokens if kv_ready else loaded
        self.blocks = 0
        self.first_step = -1
        """Index of the step whose end gives the first token; step i gives token i - first_step."""
        self.queued_s = 0.0
        self.scheduled_s = -1.0
        self.state = State.NEW


class Step(NamedTuple):
    """One finished step. All sequences in `emitted` get one token at `end_s`, together."""

    number: int
    start_s: float
    end_s: float
    emitted: list[Sequence]
    first: list[Sequence]
    """Those whose prefill this step completed; also in `emitted`."""
    finished: list[Sequence]
    """Those whose last token this is; also in `emitted`."""
    prefill_tokens: int
    decoding: int
