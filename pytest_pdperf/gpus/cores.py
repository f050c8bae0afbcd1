"""Cores of the load client, apart from the engines': a client that waits for a core blames the server for it.

Pure but for `siblings_of`: what is bound where comes in, who gets what and why goes out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

KEPT_CPUS = 8
"""CPUs that an engine keeps at least where some are taken from it for the client."""


def core_list(cpus: Iterable[int]) -> str:
    """CPU numbers as Linux writes them, `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def parse_cores(text: str) -> frozenset[int]:
    """Inverse of `core_list`. Raises ValueError."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low:
            cpus.update(range(int(low), int(high or low) + 1))
    return frozenset(cpus)


def siblings_of(cpu: int, root: Path = Path("/sys/devices/system/cpu")) -> frozenset[int]:
    """The CPUs (hardware threads) of the same core, itself included; itself alone where that is unknown."""
    try:
        text = (root / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return frozenset({cpu})
    return parse_cores(text) | {cpu}


@dataclass(frozen=True, slots=True)
class ClientCores:
    """Where the client runs, and what is left to the engines."""

    cpus: tuple[int, ...]
    """CPUs to stay on; empty leaves the client to the kernel."""
    engines: Mapping[str, tuple[int, ...]]
    """Instance -> CPUs to stay on; instances that are bound to none are left out."""
    why: str

    def describe(self) -> str:
        """One line for plan and record."""
        return f"CPUs {core_list(self.cpus)} ({self.why})" if self.cpus else f"any CPU ({self.why})"


def client_cores(
    engines: Mapping[str, tuple[int, ...]],
    usable: Collection[int],
    *,
    unbound: Collection[str] = (),
    wanted: int = 1,
    siblings: Callable[[int], frozenset[int]] = siblings_of,
) -> ClientCores:
    """Keep the client off the engines' CPUs.

    `engines` are the CPUs that placement binds each instance to, `unbound` the instances that it binds to none (their
    GPUs hang on several sockets), `usable` the CPUs of this process. CPUs that no engine is
    bound to are the client's, all of them. Where the engines are bound to all, as with GPUs on both sockets, `wanted`
    whole cores are taken from them, unless that would leave one with fewer than `KEPT_CPUS`.
    """
    if not engines:
        return ClientCores((), engines, "engines are not bound to CPUs, so none can be kept from them")
    bound = frozenset().union(*engines.values())
    free = frozenset(usable) - bound
    if free:
        stray = f"; {', '.join(unbound)} may run anywhere" if unbound else ""
        return ClientCores(tuple(sorted(free)), engines, f"no engine is bound to them{stray}")
    taken: set[int] = set()
    for cpu in sorted(bound & frozenset(usable), reverse=True):
        core = siblings(cpu) & bound
        if cpu not in taken and len({min(siblings(c)) for c in taken}) < wanted:
            taken |= core
    rest = {id: tuple(c for c in cpus if c not in taken) for id, cpus in engines.items()}
    if any(len(cpus) < KEPT_CPUS for cpus in rest.values()):
        return ClientCores((), engines, f"engines are bound to all {len(bound)} CPUs, too few to spare one")
    return ClientCores(tuple(sorted(taken)), rest, "kept free of engines, which have all others")
