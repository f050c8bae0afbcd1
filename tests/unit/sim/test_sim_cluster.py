"""The whole system on a virtual clock: closed forms, seeds, who stalls whom, and what faults do to it."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_pdperf.engines.sim.cluster import Deployment, simulate, simulate_cell
from pytest_pdperf.engines.sim.faults import Faults
from pytest_pdperf.engines.sim.profile import FAST, H100_QWEN3_32B
from pytest_pdperf.engines.sim.traffic import RequestTimes, Traffic
from pytest_pdperf.spec.topology import Kind

AGGREGATED, PD = Kind.AGGREGATED, Kind.PD


def cell(
    kind: Kind, shape: tuple[int, int] = (1024, 64), c: int = 4, n: int = 24, **options: object
) -> list[RequestTimes]:
    given: dict[str, object] = {"seed": 1} | options
    return simulate_cell(
        FAST,
        kind,
        input_tokens=shape[0],
        output_tokens=shape[1],
        concurrency=c,
        requests=n,
        **given,  # type: ignore[arg-type]
    )


def median_ttft(times: list[RequestTimes]) -> float:
    return statistics.median(r.ttft_s for r in times)


def median_tpot(times: list[RequestTimes]) -> float:
    return statistics.median(r.tpot_s for r in times)


@pytest.mark.parametrize("shape", [(512, 256), (4096, 128), (8192, 128), (256, 1024)])
@pytest.mark.parametrize("link", ["tcp", "rdma"])
def test_one_request_at_a_time_follows_the_closed_forms(shape: tuple[int, int], link: str) -> None:
    profile = H100_QWEN3_32B
    prompt, output = shape

    def alone(kind: Kind) -> list[RequestTimes]:
        return simulate_cell(
            profile,
            kind,
            input_tokens=prompt,
            output_tokens=output,
            concurrency=1,
            requests=40,
            seed=3,
            transport=link if kind is PD else "auto",
        )

    aggregated, pd = alone(AGGREGATED), alone(PD)
    # Hops spread by 15 % (uniform), steps are up to 0.4 % longer than computed, jitter is a half-normal.
    slack = 0.003 + 0.01 * prompt / 8192
    assert statistics.fmean(r.ttft_s for r in aggregated) == pytest.approx(
        profile.ttft_aggregated_s(prompt), abs=slack
    )
    assert statistics.fmean(r.ttft_s for r in pd) == pytest.approx(profile.ttft_pd_s(prompt, link), abs=slack)
    for times in (aggregated, pd):
        assert median_tpot(times) == pytest.approx(profile.tpot_s(prompt, output), rel=0.006)


def test_the_closed_forms_give_the_published_order_of_magnitude() -> None:
    """Values of the published table at concurrency 1, within the errors that the calibration page states."""
    profile = H100_QWEN3_32B
    assert profile.ttft_aggregated_s(4096) * 1e3 == pytest.approx(264.3, rel=0.05)
    assert profile.ttft_pd_s(4096, "tcp") * 1e3 == pytest.approx(661.2, rel=0.05)
    assert profile.ttft_pd_s(4096, "rdma") * 1e3 == pytest.approx(326.8, rel=0.08)
    assert profile.tpot_s(4096, 128) * 1e3 == pytest.approx(13.75, rel=0.02)


def test_equal_seeds_give_equal_runs() -> None:
    for kind in (AGGREGATED, PD):
        assert cell(kind) == cell(kind)
        assert cell(kind) != cell(kind, seed=2)


@given(
    kind=st.sampled_from([AGGREGATED, PD]),
    low=st.integers(1, 3000),
    more=st.integers(0, 3000),
    output=st.integers(1, 40),
    requests=st.integers(1, 20),
    concurrency=st.integers(1, 30),
    engines=st.integers(1, 3),
    policy=st.sampled_from(["round_robin", "herd"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_every_request_is_answered_in_full_and_in_order(
    kind: Kind,
    low: int,
    more: int,
    output: int,
    requests: int,
    concurrency: int,
    engines: int,
    policy: str,
    seed: int,
) -> None:
    times = simulate_cell(
        FAST,
        kind,
        input_tokens=(low, low + more),
        output_tokens=output,
        concurrency=concurrency,
        requests=requests,
        seed=seed,
        n_prefill=engines,
        n_decode=engines,
        n_server=engines,
        policy=policy,
    )
    assert [r.index for r in times] == list(range(requests))
    for r in times:
        assert low <= r.prompt_tokens <= low + more
        assert r.output_tokens == len(r.token_s) == output
        assert not r.failed
        assert r.local_prefill is (kind is AGGREGATED)
        assert r.sent_s < r.token_s[0]
        assert all(a <= b for a, b in pairwise(r.token_s))
    open_at_once = max(sum(o.sent_s <= r.sent_s < o.token_s[-1] for o in times) for r in times)
    assert open_at_once <= concurrency


def test_times_never_run_backwards_however_large_the_jitter() -> None:
    shaky = replace(FAST, jitter_s=0.05)
    times = simulate_cell(shaky, PD, input_tokens=64, output_tokens=50, concurrency=2, requests=4, seed=1)
    gaps = [b - a for r in times for a, b in pairwise(r.token_s)]
    assert min(gaps) == 0.0
    assert max(gaps) > 0.02


def longest_gap(times: list[RequestTimes], stream: str) -> float:
    return max(b - a for r in times if r.stream == stream for a, b in pairwise(r.token_s))


def test_a_long_prompt_stalls_its_neighbours_when_aggregated_and_not_under_pd() -> None:
    streams = [
        Traffic((256, 256), 200, requests=6, concurrency=3, name="steady"),
        Traffic((8000, 8000), 4, requests=3, concurrency=1, name="long", think_s=0.2),
    ]
    prefill_s = H100_QWEN3_32B.prefill_s(8000)
    aggregated = simulate(H100_QWEN3_32B, Deployment(AGGREGATED, n_server=1), streams, seed=0)
    pd = simulate(H100_QWEN3_32B, Deployment(PD, transport="rdma", n_decode=1), streams, seed=0)
    assert longest_gap(aggregated, "steady") > 0.9 * prefill_s
    assert longest_gap(pd, "steady") < 0.1 * prefill_s


def test_more_decode_engines_and_a_faster_link_help() -> None:
    assert median_tpot(cell(PD, c=16, n=64, n_decode=4)) < median_tpot(cell(PD, c=16, n=64, n_decode=1))
    big = (8192, 8)
    assert median_ttft(cell(PD, big, transport="rdma")) < median_ttft(cell(PD, big, transport="tcp"))


def test_round_robin_deals_requests_out_evenly() -> None:
    names = [r.engine for r in cell(PD, n=24, n_decode=2)]
    assert names.count("decode-0") == names.count("decode-1") == 12


@pytest.mark.parametrize(
    ("fault", "ttft", "tpot"),
    [
        ("decode_step=1.3", (1.0, 1.10), (1.25, 1.35)),
        ("prefill=1.5", (1.15, 1.5), (0.99, 1.01)),
        ("link=0.25", (1.15, 2.5), (0.99, 1.01)),
        ("throttle=1.3", (1.1, 1.35), (1.25, 1.35)),
    ],
)
def test_slow_parts_move_the_metric_they_should_and_no_other(
    fault: str, ttft: tuple[float, float], tpot: tuple[float, float]
) -> None:
    healthy, sick = cell(PD, c=1), cell(PD, c=1, faults=Faults.parse(fault))
    assert ttft[0] <= median_ttft(sick) / median_ttft(healthy) <= ttft[1]
    assert tpot[0] <= median_tpot(sick) / median_tpot(healthy) <= tpot[1]


def test_a_fault_can_sit_in_one_engine_only() -> None:
    times = cell(PD, n=24, n_decode=2, faults={"decode-1": Faults.parse("decode_step=2")})
    sick = median_tpot([r for r in times if r.engine == "decode-1"])
    well = median_tpot([r for r in times if r.engine == "decode-0"])
    assert sick / well == pytest.approx(2.0, rel=0.1)


def test_recomputing_costs_neighbours_and_is_recorded() -> None:
    # With the shares of the H100 profile a recomputed prompt lands in the decode engine's steps.
    sick = cell(PD, (4096, 64), c=8, n=48, faults=Faults.parse("recompute=every:2"))
    assert sum(r.local_prefill for r in sick) == 24
    healthy = cell(PD, (4096, 64), c=8, n=48)
    assert max(r.tpot_s for r in sick) > 1.2 * max(r.tpot_s for r in healthy)


def test_failed_transfers_are_failed_requests_without_times() -> None:
    times = cell(PD, n=20, n_decode=1, faults=Faults.parse("transfer_fail=every:4"))
    failed = [r for r in times if r.failed]
    assert len(failed) == 5
    assert all(r.token_s == () and r.output_tokens == 0 for r in failed)


def test_leaking_every_block_ends_in_a_standstill_that_is_reported() -> None:
    with pytest.raises(RuntimeError, match="KV blocks"):
        cell(PD, (8192, 64), c=4, n=400, n_decode=1, faults=Faults.parse("leak=1"))


def test_launches_differ_by_their_own_factor() -> None:
    launches = [median_tpot(cell(PD, c=1, n=4, seed=seed, launch_sigma=0.05)) for seed in range(40)]
    same = [median_tpot(cell(PD, c=1, n=4, seed=seed)) for seed in range(40)]
    assert 0.03 < statistics.stdev(launches) / statistics.fmean(launches) < 0.075
    assert statistics.stdev(same) / statistics.fmean(same) < 0.005
