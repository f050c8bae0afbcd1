"""A slower first token has one cause: split TTFT into the stages that the engines time themselves and name it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pytest_pdperf.spec.topology import Kind, Role

from .deltas import HistogramDelta, restarted
from .exposition import Snapshot, Unknown
from .names import Form, Quantity
from .readings import engine_of, find_form, observations
from .router_time import RouterTime

STAGES = (
    "prefill_queue",
    "bootstrap",
    "prefill",
    "transfer",
    "decode_queue",
    "first_decode_step",
    "hand_over",
    "router",
    "client",
)
"""In the order of a request. `hand_over` is the time inside the engines' API servers and between the stages,
`router` what the router adds, `client` the lag of the load generator."""

Dispatch = Literal["sequential", "parallel"]


@dataclass(frozen=True, slots=True)
class TtftSplit:
    """Mean TTFT of a window and its stages, in ms. A stage that is None is not known.

    `closure_error_ms` is what the known stages do not explain (negative: they overlap). Stages are means over
    all requests of the window, because histograms give exact sums and no exact medians.
    """

    measured_ms: float
    stages: Mapping[str, float | None]
    closure_error_ms: float
    notes: tuple[str, ...] = ()

    @property
    def closure_share(self) -> float | None:
        """Unexplained part of the measured TTFT, signed."""
        return self.closure_error_ms / self.measured_ms if self.measured_ms > 0 else None

    @property
    def largest(self) -> str | None:
        """The stage that takes longest, or None when none is known."""
        known = {name: value for name, value in self.stages.items() if value is not None}
        return max(known, key=lambda name: known[name]) if known else None

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the inverse."""
        return {
            "measured_ms": self.measured_ms,
            "stages": dict(self.stages),
            "closure_error_ms": self.closure_error_ms,
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TtftSplit:
        """Inverse of `to_json`."""
        return cls(data["measured_ms"], dict(data["stages"]), data["closure_error_ms"], tuple(data["notes"]))


@dataclass
class _Means:
    """Mean durations (ms) of one role over its replicas, with the holes met on the way."""

    windows: Sequence[tuple[str, Snapshot, Snapshot]]
    requests: int
    notes: list[str] = field(default_factory=list)

    def total(self, quantity: Quantity) -> HistogramDelta | None:
        found = [(name, observations(before, after, quantity)) for name, before, after in self.windows]
        holes = [f"{name}: {value.reason}" for name, value in found if isinstance(value, Unknown)]
        known = [value for _, value in found if isinstance(value, HistogramDelta)]
        self.notes += holes
        if holes or not known:
            return None
        return HistogramDelta(sum(d.count for d in known), sum(d.total for d in known))

    def has(self, quantity: Quantity) -> bool:
        """Whether every replica prints it."""
        return all(isinstance(find_form(page, quantity), Form) for _, _, page in self.windows)

    def mean(self, quantity: Quantity) -> float | None:
        delta = self.total(quantity)
        if delta is None or delta.mean is None:
            return None
        if quantity is not Quantity.TRANSFER_SECONDS and delta.count != self.requests:
            self.notes.append(
                f"{quantity.value} is a mean over {delta.count:g} observations, not {self.requests}"
            )
        return delta.mean * 1000.0


def split_ttft(
    kind: Kind | str,
    before: Mapping[str, Snapshot | Unknown],
    after: Mapping[str, Snapshot | Unknown],
    roles: Mapping[str, Role],
    *,
    measured_ttft_ms: float,
    requests: int,
    router_ms: float | None = None,
    router_time: RouterTime | None = None,
    client_lag_ms: float | None = None,
    dispatch: Dispatch | None = None,
) -> TtftSplit | Unknown:
    """Split the mean TTFT that the client measured over the same requests that the window holds.

    `measured_ttft_ms` is the mean over those `requests`, warm-ups included; `router_ms` what the router adds, where it
    is known (else it is part of the closure error). `router_time` is better: the router's own clocks over the same
    requests. `dispatch` says whether the router sends to prefill first or to both roles at once; by default sequential
    for vLLM and parallel for SGLang.
    """
    windows: dict[Role, list[tuple[str, Snapshot, Snapshot]]] = {role: [] for role in Role}
    for name, role in roles.items():
        first, last = (
            before.get(name, Unknown("was not scraped")),
            after.get(name, Unknown("was not scraped")),
        )
        if isinstance(first, Unknown) or isinstance(last, Unknown):
            page = first if isinstance(first, Unknown) else last
            return Unknown(f"{name}: {page.reason if isinstance(page, Unknown) else ''}")
        if reason := restarted(first, last):
            return Unknown(f"{name}: restarted in the window ({reason})")
        windows[role].append((name, first, last))
    stages: dict[str, float | None] = dict.fromkeys(STAGES)
    stages["router"], stages["client"] = router_ms, client_lag_ms
    if Kind(kind) is Kind.AGGREGATED:
        server = _Means(windows[Role.SERVER], requests)
        _aggregated(stages, server)
        notes = server.notes
    else:
        prefill, decode = _Means(windows[Role.PREFILL], requests), _Means(windows[Role.DECODE], requests)
        engines = {engine_of(page) for rows in windows.values() for _, _, page in rows}
        way = dispatch or ("parallel" if engines == {"sglang"} else "sequential")
        if way == "parallel":
            _parallel(stages, prefill, decode)
        else:
            _sequential(stages, prefill, decode, router_time)
        notes = prefill.notes + decode.notes
    explained = sum(value for value in stages.values() if value is not None)
    return TtftSplit(measured_ttft_ms, stages, measured_ttft_ms - explained, tuple(dict.fromkeys(notes)))


def _aggregated(stages: dict[str, float | None], server: _Means) -> None:
    queue, work = server.mean(Quantity.QUEUE_SECONDS), server.mean(Quantity.PREFILL_SECONDS)
    stages["prefill_queue"], stages["prefill"] = queue, work
    stages["hand_over"] = _minus(server.mean(Quantity.TTFT_SECONDS), queue, work)


def _sequential(
    stages: dict[str, float | None], prefill: _Means, decode: _Means, router_time: RouterTime | None
) -> None:
    """Prefill's whole answer comes before decode starts: both engines' times add up.

    vLLM's queue time on decode covers the wait for remote KV, so the transfer is taken out of it; its prefill
    time there is the first decode step. Its API servers time whole answers, parsing and tokenising included; engines
    without that clock give their own end-to-end time. What a router's clock shows beyond prefill's answer is its own
    work, its hops to both engines and decode's parsing. An engine that computes in the process of its API server may
    send its head late, with the first token: then decode's stages overlap with the router's, and the closure error is
    negative.
    """
    queue_p, work_p = prefill.mean(Quantity.QUEUE_SECONDS), prefill.mean(Quantity.PREFILL_SECONDS)
    queue_d, step_d = decode.mean(Quantity.QUEUE_SECONDS), decode.mean(Quantity.PREFILL_SECONDS)
    transfer = decode.mean(Quantity.TRANSFER_SECONDS)
    stages["prefill_queue"], stages["prefill"] = queue_p, work_p
    stages["transfer"], stages["first_decode_step"] = transfer, step_d
    if queue_d is not None:
        stages["decode_queue"] = queue_d if transfer is None else max(0.0, queue_d - transfer)
        if transfer is not None and transfer > queue_d:
            decode.notes.append("transfers took longer than decode's queue time, which should hold them")
    clocked = prefill.has(Quantity.HTTP_SECONDS) and decode.has(Quantity.HTTP_SECONDS)
    answer = prefill.mean(Quantity.HTTP_SECONDS if clocked else Quantity.E2E_SECONDS)
    around: float | None = 0.0
    if router_time is not None and answer is not None:
        until = router_time.head_ms
        if until is None:
            until = router_time.leg_ms
            if clocked:
                around = _minus(decode.mean(Quantity.HTTP_SECONDS), decode.mean(Quantity.E2E_SECONDS))
        stages["router"] = stages["router"] if until is None else until - answer
    ahead = _minus(answer, queue_p, work_p)
    behind = _minus(decode.mean(Quantity.TTFT_SECONDS), queue_d, step_d)
    stages["hand_over"] = (
        None if ahead is None or behind is None or around is None else ahead + behind + around
    )


def _parallel(stages: dict[str, float | None], prefill: _Means, decode: _Means) -> None:
    """Both roles get the request at once: decode's TTFT holds everything, prefill's stages lie inside it."""
    names = (
        ("prefill_queue", Quantity.QUEUE_SECONDS),
        ("bootstrap", Quantity.BOOTSTRAP_SECONDS),
        ("prefill", Quantity.PREFILL_SECONDS),
        ("transfer", Quantity.TRANSFER_SECONDS),
    )
    for stage, quantity in names:
        stages[stage] = prefill.mean(quantity)
    queue_d = decode.mean(Quantity.QUEUE_SECONDS)
    stages["decode_queue"] = queue_d
    inside = [stages[stage] for stage, _ in names]
    stages["hand_over"] = _minus(decode.mean(Quantity.TTFT_SECONDS), queue_d, *inside)


def _minus(whole: float | None, *parts: float | None) -> float | None:
    if whole is None or any(part is None for part in parts):
        return None
    return whole - sum(part for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class Movement:
    """Which stage accounts for a change of TTFT between two splits."""

    stage: str
    """A stage, `unexplained` when the closure error moved most, `none` when TTFT did not move."""
    change_ms: float
    share: float | None
    """Part of the whole change that this stage accounts for."""
    ttft_change_ms: float


def moved_stage(baseline: TtftSplit, now: TtftSplit, *, floor_ms: float = 1.0) -> Movement:
    """Name the stage that moved TTFT most in the direction in which it moved.

    Changes of the whole below `floor_ms` are `none`. A stage known on one side only counts as unexplained.
    """
    whole = now.measured_ms - baseline.measured_ms
    if abs(whole) < floor_ms:
        return Movement("none", 0.0, None, whole)
    sign = 1.0 if whole > 0 else -1.0
    changes: dict[str, float] = {}
    for stage in STAGES:
        old, new = baseline.stages.get(stage), now.stages.get(stage)
        if old is not None and new is not None:
            changes[stage] = new - old
    changes["unexplained"] = whole - sum(changes.values())
    stage = max(changes, key=lambda name: sign * changes[name])
    return Movement(stage, changes[stage], changes[stage] / whole, whole)
