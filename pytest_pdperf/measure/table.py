"""The metric table: the one place that says what each number is, which way is better and how much it may
lose.

Reports, baselines, the gate and the documentation read it; a definition that changes gets a new
`DEFINITIONS`, because old baselines then no longer compare.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFINITIONS = "pdperf-1"
"""Version of all definitions below. Part of a baseline's key and of every exported result."""

LOWER = 1
HIGHER = -1


@dataclass(frozen=True, slots=True)
class Metric:
    """One reported number."""

    id: str
    label: str
    unit: str
    direction: int
    """+1 lower is better, -1 higher is better."""
    definition: str
    tau: float | None = None
    """Relative change that is tolerated; None for a metric that is not gated."""
    floor: float = 0.0
    """Absolute change, in `unit`, below which nothing is a regression."""
    min_n: int = 1
    """Fewer samples than this are shown but never gated."""
    gated: bool = False
    prior_sd: float = 0.03
    """Launch-to-launch standard deviation of ln(value) that the gate assumes until sibling cells give one.

    For TTFT p50 three launches of 512/256 on two H200 gave 0.02, 0.07, 0.13 and 0.11 at concurrency 1, 4, 8 and
    16 (`docs/results/h200x2`): at a medium concurrency the median depends on how requests happen to bunch.
    """
    percentile: float | None = None
    """Percentile of the pooled samples, 0..100; None when the number is no percentile."""


P95_MIN_N = 59
"""Fewest samples whose maximum lies above the true 95th percentile with 95 % confidence: 0.95**59 < 0.05."""
P99_MIN_N = 299
"""The same for the 99th: 0.99**299 < 0.05."""
_MIN_N = {95.0: P95_MIN_N, 99.0: P99_MIN_N}

_TTFT = "first token event - request bytes handed to the kernel"
_TTFT_SCHEDULED = (
    "first token event - time the schedule of an open loop wanted the request sent: "
    "what waited in the client is in it"
)
_TPOT = "(last token - first token) / (N - 1), N = completion tokens as the server counted them; undefined for N < 2"
_TPOT_ADJUSTED = "(last token - first token) / (N - k), k = tokens of the first event; undefined for N = k"
_ITL = "gaps between token events, pooled over the cell's requests; an event of k tokens is one gap"
_ITL_PER_TOKEN = "the same gaps, each split evenly over the tokens that its event brought"
_E2E = "last token - request bytes handed to the kernel"
_LAG = "user-space receive time - kernel receive time, over all token events"
_STALL = "gaps longer than 5 x the median gap of the cell"


def _percentiles(
    stem: str,
    label: str,
    definition: str,
    gates: dict[float, tuple[float, float]],
    shown: tuple[float, ...],
    floor: float = 0.0,
) -> list[Metric]:
    """A row a percentile; `gates` maps a percentile to (tau, prior_sd)."""
    rows = []
    for p in shown:
        tau, prior = gates.get(p, (None, 0.05))
        rows.append(
            Metric(
                id=f"{stem}_p{p:g}",
                label=f"{label} p{p:g}",
                unit="ms",
                direction=LOWER,
                definition=f"{p:g}th percentile (linear interpolation) of: {definition}",
                tau=tau,
                floor=floor,
                min_n=_MIN_N.get(p, 1),
                gated=tau is not None,
                prior_sd=prior,
                percentile=p,
            )
        )
    return rows


def _plain(id_: str, label: str, unit: str, direction: int, definition: str) -> Metric:
    return Metric(id_, label, unit, direction, definition)


_ROWS: tuple[Metric, ...] = (
    *_percentiles(
        "ttft_ms",
        "TTFT",
        _TTFT,
        {50: (0.10, 0.07), 95: (0.20, 0.07), 99: (0.20, 0.08)},
        (50, 95, 99),
        floor=1.0,
    ),
    _plain("ttft_ms_mean", "TTFT mean", "ms", LOWER, f"mean of: {_TTFT}"),
    _plain("ttft_ms_max", "TTFT max", "ms", LOWER, f"maximum of: {_TTFT}"),
    *_percentiles("tpot_ms", "TPOT", _TPOT, {50: (0.05, 0.01)}, (50, 95, 99), floor=0.2),
    _plain("tpot_ms_mean", "TPOT mean", "ms", LOWER, f"mean of: {_TPOT}"),
    *_percentiles("tpot_adjusted_ms", "TPOT adjusted", _TPOT_ADJUSTED, {}, (50,), floor=0.2),
    *_percentiles("itl_ms", "ITL", _ITL, {99: (0.10, 0.04)}, (50, 95, 99), floor=0.2),
    _plain("itl_ms_mean", "ITL mean", "ms", LOWER, f"mean of: {_ITL}"),
    _plain("itl_ms_max", "ITL max", "ms", LOWER, f"maximum of: {_ITL}"),
    *_percentiles("itl_per_token_ms", "ITL per token", _ITL_PER_TOKEN, {}, (50, 99), floor=0.2),
    *_percentiles("e2e_ms", "E2E", _E2E, {50: (0.05, 0.015)}, (50, 95, 99), floor=1.0),
    _plain("e2e_ms_max", "E2E max", "ms", LOWER, f"maximum of: {_E2E}"),
    Metric(
        "output_tps",
        "output throughput",
        "tok/s",
        HIGHER,
        "output tokens that arrived in the steady window / its length; the window runs from the first moment all "
        "clients are busy to the last request issued",
        tau=0.05,
        gated=True,
        prior_sd=0.015,
    ),
    _plain(
        "output_tps_wall",
        "output throughput, wall",
        "tok/s",
        HIGHER,
        "output tokens / (last end - first send)",
    ),
    _plain(
        "input_tps_wall", "input throughput, wall", "tok/s", HIGHER, "prompt tokens / (last end - first send)"
    ),
    _plain("request_rate", "request rate", "req/s", HIGHER, "successful requests / (last end - first send)"),
    _plain(
        "goodput_share",
        "goodput share",
        "1",
        HIGHER,
        "requests that kept every bound of the SLO / all requests",
    ),
    _plain(
        "goodput_rps", "goodput", "req/s", HIGHER, "requests that kept every bound of the SLO / wall time"
    ),
    _plain("stall_count", "stalls", "1", LOWER, f"number of {_STALL}"),
    _plain("stall_total_ms", "stalled time", "ms", LOWER, f"sum of {_STALL}"),
    _plain("stall_longest_ms", "longest stall", "ms", LOWER, f"longest of {_STALL}"),
    _plain(
        "zero_gap_share",
        "zero gaps",
        "1",
        LOWER,
        "share of gaps that are 0: events that arrived in one segment",
    ),
    *_percentiles("ttft_from_schedule_ms", "TTFT from schedule", _TTFT_SCHEDULED, {}, (50, 99)),
    _plain(
        "ttft_from_schedule_ms_max", "TTFT from schedule max", "ms", LOWER, f"maximum of: {_TTFT_SCHEDULED}"
    ),
    *_percentiles("send_lag_ms", "send lag", "request sent - time its schedule wanted it sent", {}, (50, 99)),
    *_percentiles("client_lag_ms", "client lag", _LAG, {}, (50, 99)),
    _plain("client_lag_ms_max", "client lag max", "ms", LOWER, f"maximum of: {_LAG}"),
)

METRICS: dict[str, Metric] = {row.id: row for row in _ROWS}
