"""Which client is put under which load: what one command measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.client.load import Load

Who = Literal["all", "loops", "pdperf"]


@dataclass(frozen=True, slots=True)
class Section:
    """One table. `loops` are pdperf and the plain loops; `all` adds the programs."""

    load: Load
    who: Who


SECTIONS: dict[str, Section] = {
    "64 x 50/s": Section(Load(64, 128, 100, 50, 20), "all"),
    "256 x 10/s": Section(Load(256, 512, 30, 50, 100), "all"),
    "64 x 50/s spread": Section(Load(64, 128, 100, 50, 20, phases=64), "loops"),
    "64 x 50/s, hog": Section(Load(64, 128, 100, 50, 20, hog_ms=10), "loops"),
    "1000 x 10/s": Section(Load(1000, 1000, 50, 300, 100, phases=1000), "pdperf"),
    "1000 x 20/s": Section(Load(1000, 1000, 100, 300, 50, phases=1000), "pdperf"),
    "1000 x 20/s at once": Section(Load(1000, 1000, 100, 300, 50), "pdperf"),
}

LADDER = (1_000, 2_000, 4_000, 8_000, 12_000, 16_000, 20_000, 25_000, 30_000)
"""Events/s of the rungs on which the highest sustained rate is looked for."""
SUSTAINED_MS = 5.0
"""A rate is sustained while 99 % of the events are read within this time of their arrival."""


def rung(events_per_s: int) -> Load:
    """Streams of 20 events/s each, spread evenly, for 3 s."""
    streams = events_per_s // 20
    return Load(streams, streams, 60, 100, 50, phases=streams)
