"""What is to go wrong: fault knobs of a simulated engine, read from `key=value[,key=value]`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from random import Random
from types import MappingProxyType

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.roles import Role


@dataclass(frozen=True, slots=True)
class Chance:
    """How often a fault strikes: with `probability` each time, or on every n-th time exactly."""

    probability: float = 0.0
    every: int = 0

    def __bool__(self) -> bool:
        return self.probability > 0 or self.every > 0


class Dice:
    """Decides, time after time and repeatably by seed, whether a fault strikes now."""

    __slots__ = ("_chance", "_count", "_random")

    def __init__(self, chance: Chance, random: Random) -> None:
        self._chance = chance
        self._count = 0
        self._random = random

    def strikes(self) -> bool:
        """True when this occasion is hit; every call is one occasion."""
        if not self._chance:
            return False
        self._count += 1
        if self._chance.every:
            return self._count % self._chance.every == 0
        return self._random.random() < self._chance.probability

    def load(self, chance: Chance) -> None:
        """From now on strike with this chance, counting occasions from here."""
        self._chance = chance
        self._count = 0


@dataclass(frozen=True, slots=True)
class Throttle:
    """All steps `factor` times as long from `after_s` seconds of uptime on, as on a GPU that got hot."""

    factor: float = 1.0
    after_s: float = 0.0


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("must be a finite number above 0")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("must be a finite number of seconds, 0 or more")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be a whole number above 0")
    return value


def _chance(text: str) -> Chance:
    head, colon, tail = text.partition(":")
    if head == "every" and colon:
        return Chance(every=_count(tail))
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError("must be a probability from 0 to 1, or every:N")
    return Chance(probability=value)


def _throttle(text: str) -> Throttle:
    factor, _, after = text.partition(":")
    return Throttle(_positive(factor), _seconds(after) if after else 0.0)


@dataclass(frozen=True, slots=True)
class Faults:
    """Everything that is to go wrong in one engine process; the default is a healthy one."""

    decode_step: float = 1.0
    """Factor on the decode share of every step."""
    prefill: float = 1.0
    """Factor on the prefill share of every step."""
    link: float = 1.0
    """Factor on the bandwidth of the KV link (0.5 = half as fast)."""
    throttle: Throttle = field(default_factory=Throttle)
    transfer_fail: Chance = field(default_factory=Chance)
    """The decode engine's KV load fails."""
    drop_transfer: Chance = field(default_factory=Chance)
    """The transfer never ends: decode waits for ever, prefill's lease runs out."""
    recompute: Chance = field(default_factory=Chance)
    """Decode ignores the KV and computes the prompt itself."""
    corrupt: Chance = field(default_factory=Chance)
    """The KV arrives damaged: timing is right, tokens are wrong, no counter tells."""
    leak: Chance = field(default_factory=Chance)
    """Blocks of a finished request are not released."""
    error_in_stream: Chance = field(default_factory=Chance)
    """Half-way through, the stream carries an error object and ends."""
    short_output: Chance = field(default_factory=Chance)
    """The answer stops, with finish reason `stop`, at half the tokens asked for."""
    die_after_tokens: int | None = None
    """The process exits hard once it has emitted so many tokens."""
    slow_start: float = 0.0
    """Seconds added to loading."""

    @classmethod
    def parse(cls, text: str, where: str = "faults") -> Faults:
        """Read `key=value[,key=value]`; an empty text is a healthy engine.

        Raises UsageProblem naming the place, the value and the nearest key.
        """
        values: dict[str, object] = {}
        for raw in text.split(","):
            item = raw.strip()
            if not item:
                continue
            key, equals, value = (part.strip() for part in item.partition("="))
            if key not in _PARSERS:
                near = difflib.get_close_matches(key, _PARSERS, n=1)
                hint = f", did you mean {near[0]!r}?" if near else ""
                raise UsageProblem(
                    f"{where}: unknown fault {key!r}{hint} (there are: {', '.join(sorted(_PARSERS))})"
                )
            if key in values:
                raise UsageProblem(f"{where}: fault {key!r} is given twice in {text!r}")
            if not equals or not value:
                raise UsageProblem(f"{where}: fault {key!r} needs a value, as in {key}={_EXAMPLES[key]}")
            try:
                values[key] = _PARSERS[key](value)
            except ValueError as problem:
                raise UsageProblem(
                    f"{where}: {key}={value}: {problem}; for example {key}={_EXAMPLES[key]}"
                ) from None
        return cls(**values)  # type: ignore[arg-type]

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the faults that differ from a healthy engine."""
        healthy = Faults()
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != getattr(healthy, f.name))

    def without_effect_on(self, role: Role) -> tuple[str, ...]:
        """Active faults that an engine of this role has no occasion for."""
        return tuple(name for name in self.active if role not in ROLES_OF_FAULT[name])


_ALL = frozenset(Role)
_STREAMING = frozenset({Role.DECODE, Role.SERVER})

ROLES_OF_FAULT: Mapping[str, frozenset[Role]] = MappingProxyType(
    {
        "decode_step": _STREAMING,
        "prefill": _ALL,
        "link": frozenset({Role.PREFILL}),
        "throttle": _ALL,
        "transfer_fail": frozenset({Role.DECODE}),
        "drop_transfer": frozenset({Role.PREFILL}),
        "recompute": frozenset({Role.DECODE}),
        "corrupt": frozenset({Role.DECODE}),
        "leak": _ALL,
        "error_in_stream": _STREAMING,
        "short_output": _STREAMING,
        "die_after_tokens": _ALL,
        "slow_start": _ALL,
    }
)
"""Which roles a fault can act on: the one that owns the thing that breaks."""

CHANCES = tuple(f.name for f in fields(Faults) if f.type == "Chance")
"""Faults that strike request by request."""

_PARSERS: Mapping[str, Callable[[str], object]] = MappingProxyType(
    {
        "decode_step": _positive,
        "prefill": _positive,
        "link": _positive,
        "throttle": _throttle,
        "transfer_fail": _chance,
        "drop_transfer": _chance,
        "recompute": _chance,
        "corrupt": _chance,
        "leak": _chance,
        "error_in_stream": _chance,
        "short_output": _chance,
        "die_after_tokens": _count,
        "slow_start": _seconds,
    }
)

_EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "decode_step": "1.15",
        "prefill": "1.3",
        "link": "0.5",
        "throttle": "1.4:20",
        "transfer_fail": "0.1",
        "drop_transfer": "every:5",
        "recompute": "0.5",
        "corrupt": "every:3",
        "leak": "0.2",
        "error_in_stream": "every:4",
        "short_output": "every:4",
        "die_after_tokens": "200",
        "slow_start": "3",
    }
)
