"""What a running cell tells the one who waits for it, gathered without looking into a body or at any token."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .exchange import End, Exchange

RECENT = 16
"""Finished requests whose times go with each message: few, so that a message stays one atomic write to a pipe."""
WORDS_A_MARK = 3
"""`Exchange.mark` notes three numbers a read: size, kernel stamp, user stamp."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a running cell is; sent about twice a second. Its numbers are for watching, never for a result."""

    phase: str
    """`connect`, `warm-up`, `ready` (several processes wait for each other), `measure` or `decode`."""
    done: int
    total: int
    in_flight: int
    failed: int
    """Requests whose transport failed; what the bodies say is read only after the clock."""
    elapsed_s: float
    tokens: int = 0
    """Output tokens of this phase so far: planned ones of what is finished, reads of what is in flight."""
    ttft_ms: tuple[float, ...] = ()
    """Send to first read, for each of the latest finished requests."""
    itl_ms: tuple[float, ...] = ()
    """Mean gap between reads, for each of the latest finished requests that had several."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Progress:
        """Read one progress line of the worker."""
        times = {name: tuple(data[name]) for name in ("ttft_ms", "itl_ms")}
        return cls(**{**data, **times})


class Gauge:
    """Keeps what `Progress` shows: an append when a request ends, arithmetic only when somebody asks."""

    def __init__(self) -> None:
        self._tokens = 0
        self._recent: deque[Exchange] = deque(maxlen=RECENT)

    def restart(self) -> None:
        """A new phase begins: warm-ups are not shown among measured requests."""
        self._tokens = 0
        self._recent.clear()

    def finished(self, exchange: Exchange) -> None:
        """Note a request that has ended well."""
        self._tokens += exchange.output_tokens
        self._recent.append(exchange)

    def tokens(self, in_flight: Iterable[Exchange]) -> int:
        """Output tokens so far; a read of a request in flight counts as one."""
        return self._tokens + sum(min(_reads(one), one.output_tokens) for one in in_flight)

    def ttft_ms(self) -> tuple[float, ...]:
        """Of the latest finished requests."""
        return tuple(round((one.marks[1] - one.sent_ns) / 1e6, 3) for one in self._recent if _reads(one))

    def itl_ms(self) -> tuple[float, ...]:
        """Mean gap of the latest finished requests."""
        return tuple(
            round((one.marks[-2] - one.marks[1]) / (reads - 1) / 1e6, 3)
            for one in self._recent
            if (reads := _reads(one)) > 1
        )


def ended_well(exchange: Exchange) -> bool:
    """As far as the transport can tell."""
    return exchange.end in (End.COMPLETE, End.DONE) and exchange.status == 200


def _reads(exchange: Exchange) -> int:
    return len(exchange.marks) // WORDS_A_MARK
