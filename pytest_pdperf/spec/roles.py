"""The words that processes share with the specification, apart from it: a simulated engine starts without pydantic."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """The two ways of serving that the suite compares; also the pytest marker of a topology's items."""

    PD = "pd"
    AGGREGATED = "aggregated"


class Role(StrEnum):
    """What one engine process does."""

    PREFILL = "prefill"
    DECODE = "decode"
    SERVER = "server"
