"""What the client's core allows, whatever the client: `python -m benchmarks.client.machine`.

A loop that only counts runs on the core and notes how long each slice of it took. What it loses, no process here need
have taken: a virtual machine's host slows it down without a trace in its own accounts. The slices are then replayed as
the core of an imagined reader that needs so much undisturbed CPU time an event and does nothing else.
"""

from __future__ import annotations

import argparse
import os
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.client.waiting import since, waited_s

Floats = NDArray[np.float64]
TURNS = 150
"""Turns of the counting loop a slice: some microseconds."""
STRETCH_NS = 20e6
STEPS_US = tuple(float(us) for us in np.arange(0.5, 30.1, 0.5))


@dataclass(frozen=True, slots=True)
class Core:
    """A core as the counting loop saw it: slices that would each take `slice_ns` if nothing disturbed them."""

    slices_ns: Floats
    waited_s: float | None = None
    """How long of it another process of this machine had the core; what else is lost went to the host."""

    @property
    def slice_ns(self) -> float:
        """The median slice stands for an undisturbed one."""
        return float(np.median(self.slices_ns))

    @property
    def seconds(self) -> float:
        """How long was looked."""
        return float(self.slices_ns.sum()) / 1e9

    @property
    def lost(self) -> float:
        """Share of the time beyond that of undisturbed slices."""
        return 1 - self.slice_ns * self.slices_ns.size / float(self.slices_ns.sum())

    @property
    def slowest(self) -> float:
        """How many times longer than undisturbed the slowest stretch of 20 ms took, 1 for none."""
        ends = np.cumsum(self.slices_ns)
        edges = np.arange(0, ends[-1] + 1, STRETCH_NS)
        done = np.diff(np.searchsorted(ends, edges, side="right"))
        return STRETCH_NS / (max(1.0, float(done.min())) * self.slice_ns) if done.size else 1.0

    def lag_ms(self, events_per_s: float, cpu_us: float) -> Floats:
        """Lag of evenly spaced events of a reader that needs `cpu_us` of undisturbed CPU for each, in their order.

        Work done by a moment is the undisturbed time that the slices until then were worth; an event is begun once its
        own arrival has passed and the work for all before it is done (Lindley's recursion, in work instead of time).
        """
        ends = np.cumsum(self.slices_ns)
        work = np.arange(1, ends.size + 1) * self.slice_ns
        arrivals = np.arange(ends[0], ends[-1], 1e9 / events_per_s)
        need = np.arange(arrivals.size) * cpu_us * 1e3
        begun = np.maximum.accumulate(np.interp(arrivals, ends, work) - need) + need
        kept = begun <= work[-1]
        begun_at: Floats = np.interp(begun[kept], work, ends)
        lag: Floats = np.maximum(0.0, begun_at - arrivals[kept]) / 1e6
        return lag

    def allows_us(self, events_per_s: float, limit_ms: float) -> float | None:
        """Most CPU time an event may take for a lag p99 below the limit, in half microseconds; None for none at all."""
        best = None
        for us in STEPS_US:
            if us * events_per_s >= 1e6 or np.percentile(self.lag_ms(events_per_s, us), 99) >= limit_ms:
                break
            best = us
        return best

    def line(self, events_per_s: float, limit_ms: float) -> str:
        """One line for the head of a table."""
        most = self.allows_us(events_per_s, limit_ms)
        reader = (
            "no reader at all keeps" if most is None else f"a reader of at most {most:g} us an event keeps"
        )
        others = (
            "" if self.waited_s is None else f" ({self.waited_s / self.seconds:.1%} to other processes here)"
        )
        return (
            f"the client's core on its own: a counting loop lost {self.lost:.1%} of {self.seconds:.0f} s{others}, its "
            f"slowest 20 ms took {self.slowest:.1f} times as long; there {reader} lag p99 below {limit_ms:g} ms at "
            f"{events_per_s:,.0f} events/s"
        )


def watch_core(core: int, seconds: float, clock: Callable[[], int] = time.perf_counter_ns) -> Core:
    """Count on a core for so long; this process may run where it could before afterwards."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    slices = array("q")
    waited = waited_s()
    try:
        last = clock()
        end = last + round(seconds * 1e9)
        while last < end:
            for _ in range(TURNS):
                pass
            now = clock()
            slices.append(now - last)
            last = now
    finally:
        os.sched_setaffinity(0, before)
    return Core(np.asarray(slices, dtype=np.float64), since(waited))


def main(argv: Sequence[str] | None = None) -> None:
    """Look at the core that the benchmark gives to clients."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.client.machine", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=20_000.0, help="events/s (default 20,000)")
    options = parser.parse_args(argv)
    found = watch_core(max(os.sched_getaffinity(0)), options.seconds)
    print(found.line(options.rate, 5.0))
    for us in (1, 2, 4, 6, 8, 10, 15, 20):
        lag = found.lag_ms(options.rate, us)
        print(f"{us:4} us an event: lag p50 {np.median(lag):6.3f} ms, p99 {np.percentile(lag, 99):6.2f} ms")


if __name__ == "__main__":
    main()
