"""Profiles: the calibrated numbers, the link's formula, and names that nobody knows."""

from __future__ import annotations

import pytest

from pytest_pdperf.engines.sim.profile import FAST, H100_QWEN3_32B, PROFILES, Link, link_named, profile_named
from pytest_pdperf.errors import UsageProblem


def test_the_h100_profile_has_the_calibrated_parameters() -> None:
    p = H100_QWEN3_32B
    milli = [p.hop_s, p.pd_hop_s, p.prefill_floor_s, p.decode_floor_s, p.decode_sequence_s, p.jitter_s]
    assert [round(1e3 * value, 4) for value in milli] == [17.2385, 9.9404, 36.7552, 13.35, 0.0872, 1.1354]
    assert (p.prefill_token_s, round(1e9 * p.prefill_token2_s, 3), round(1e9 * p.decode_context_s, 1)) == (
        5.7e-5,
        0.798,
        53.8,
    )
    assert (p.token_budget, p.max_seqs, p.kv_bytes_per_token) == (8192, 64, 262_144)
    assert round(p.links["tcp"].bytes_per_s / 1e9, 3) == 2.864
    assert round(p.links["tcp"].congestion, 3) == 0.059
    assert (round(p.links["rdma"].bytes_per_s / 1e9, 2), p.links["rdma"].congestion) == (21.63, 0.0)


def test_a_link_slows_down_by_what_is_outstanding() -> None:
    link = Link(120.0, congestion=0.1)
    assert [link.rate(k) for k in (1, 2, 3)] == pytest.approx([120.0, 120 / 1.1, 100.0])


def test_a_slower_launch_is_slower_in_everything_the_machine_does_itself() -> None:
    slow = FAST.slowed(1.1)
    assert slow.prefill_s(1000, 500) == pytest.approx(1.1 * FAST.prefill_s(1000, 500))
    assert slow.decode_s(5, 3000) == pytest.approx(1.1 * FAST.decode_s(5, 3000))
    assert slow.prefill_floor_s == pytest.approx(1.1 * FAST.prefill_floor_s)
    assert (slow.hop_s, slow.links) == (FAST.hop_s, FAST.links)


def test_fast_is_fast_enough_for_a_quick_workload() -> None:
    assert FAST.ttft_aggregated_s(1024) < 0.06
    assert 0.010 < 1024 * FAST.kv_bytes_per_token / FAST.links["tcp"].bytes_per_s < 0.020
    assert 0.004 < FAST.decode_s(1, 1024) < 0.006


def test_names() -> None:
    assert profile_named("fast") is FAST
    assert set(PROFILES) == {"fast", "h100-qwen3-32b"}
    with pytest.raises(UsageProblem, match="did you mean 'h100-qwen3-32b'"):
        profile_named("h100-qwen3-32")
    with pytest.raises(UsageProblem, match="there are: fast, h100-qwen3-32b"):
        profile_named("zzz")
    assert link_named(H100_QWEN3_32B, "auto") == "tcp"
    assert link_named(H100_QWEN3_32B, "rdma") == "rdma"
    with pytest.raises(UsageProblem, match="not calibrated for 'nvlink'"):
        link_named(H100_QWEN3_32B, "nvlink")
