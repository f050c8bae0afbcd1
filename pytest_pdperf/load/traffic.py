"""A stream while it is being driven: whose turn it is, and whether it is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .exchange import Exchange


class Order(Protocol):
    """Says which request goes next."""

    def take(self) -> int | None:
        """Position of the next request, None when there is none left."""


@dataclass(slots=True)
class Traffic:
    """One traffic class, or one process's share of it."""

    name: str
    queue: Mapping[int, Exchange]
    """Position in the plan -> request."""
    order: Order
    clients: int | None
    """Closed loop with so many clients, None for an open loop."""
    offsets: Sequence[float | None] = ()
    """Open loop: when each is due after the start, by position."""
    think_s: float = 0.0
    taken: list[Exchange] = field(default_factory=list)
    dry: bool = False
    """Nothing is left to take."""
    in_flight: int = 0
    peak: int = 0
    done: int = 0

    @property
    def over(self) -> bool:
        """Everything taken is done, and there is no more."""
        return self.dry and self.done == len(self.taken)

    @property
    def left(self) -> int:
        """Requests that may still come; other processes may take some of them."""
        return 0 if self.dry else len(self.queue) - len(self.taken)

    def take(self) -> Exchange | None:
        """The next request, None when there is none left."""
        position = None if self.dry else self.order.take()
        if position is None:
            self.dry = True
            return None
        exchange = self.queue[position]
        self.taken.append(exchange)
        return exchange
