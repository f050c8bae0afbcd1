"""What a request costs outside of the engines' own clocks: HTTP, API servers and parsing, from an idle stack."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_pdperf.spec.topology import Role

from .cell_evidence import Watched
from .exposition import Snapshot, Unknown
from .names import Quantity
from .readings import engine_of, observations


def outside_ms(
    watched: Watched,
    before: Mapping[str, Snapshot | Unknown],
    after: Mapping[str, Snapshot | Unknown],
    direct_mean_ms: float,
) -> float | None:
    """Part of a request's time that no engine accounts for: client's mean less the engines' own over the same requests.

    `direct_mean_ms` is of requests past the router. Sequential roles add up (vLLM); where both get the request at
    once (SGLang), decode's time holds prefill's. None where an engine does not time its requests.
    """
    means: dict[Role, float] = {}
    for role in set(watched.roles.values()):
        count = total = 0.0
        for name in (name for name, own in watched.roles.items() if own is role):
            first, last = before.get(name), after.get(name)
            if not isinstance(first, Snapshot) or not isinstance(last, Snapshot):
                return None
            seen = observations(first, last, Quantity.E2E_SECONDS)
            if isinstance(seen, Unknown):
                return None
            count, total = count + seen.count, total + seen.total
        if count <= 0:
            return None
        means[role] = total / count * 1000.0
    engines = {engine_of(page) for page in after.values() if isinstance(page, Snapshot)}
    inside = means[Role.DECODE] if engines == {"sglang"} and Role.DECODE in means else sum(means.values())
    return direct_mean_ms - inside
