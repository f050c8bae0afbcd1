"""What the simulated hardware costs: every duration the timing model knows, in one frozen record a machine."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from pytest_pdperf.errors import UsageProblem

VERSION = "0.1.0+simulated"
"""Version of the timing model; it goes up when equal inputs stop giving equal times."""


@dataclass(frozen=True, slots=True)
class Link:
    """How fast KV cache leaves a prefill engine, alone and under congestion.

    With k transfers outstanding the whole link moves `bytes_per_s / (1 + congestion * (k - 1))`; the first `lanes`
    of them share that equally and the others wait in order.
    """

    bytes_per_s: float
    congestion: float = 0.0
    lanes: int = 4

    def rate(self, outstanding: int) -> float:
        """Bytes per second of the whole link with `outstanding` >= 1 transfers."""
        return self.bytes_per_s / (1.0 + self.congestion * (outstanding - 1))


@dataclass(frozen=True, slots=True)
class Profile:
    """One machine and model as the timing model sees it. Times in seconds, sizes in bytes or tokens."""

    name: str
    hop_s: float
    """Client, router, tokeniser and scheduler before a request stands in an engine's queue."""
    pd_hop_s: float
    """Control hop of a disaggregated request, from the end of the KV copy to the decode queue."""
    prefill_floor_s: float
    """Shortest step that holds prefill tokens."""
    prefill_token_s: float
    prefill_token2_s: float
    """Attention: cost per token squared."""
    decode_floor_s: float
    """Decode step of one sequence with no context."""
    decode_sequence_s: float
    """Each further running sequence."""
    decode_context_s: float
    """Each token of context that the running sequences hold."""
    jitter_s: float
    """A token is seen |N(0, 1.45 * jitter_s)| after its step ended."""
    links: Mapping[str, Link]
    default_link: str
    kv_bytes_per_token: int = 262_144
    token_budget: int = 8192
    max_seqs: int = 64
    block_tokens: int = 16
    kv_blocks: int = 16_384
    max_model_len: int = 16_384
    vocabulary: int = 151_936
    step_noise: float = 0.004
    """A step takes 1 + |N(0, step_noise)| times its computed length."""
    hop_spread: float = 0.15
    """Each hop is drawn from hop_s * U(1 - hop_spread, 1 + hop_spread)."""
    handshake_s: float = 0.2
    """Extra time of the first transfer between two engines."""
    handshake_timeout_s: float = 5.0
    """How long an unreachable, unknown engine is tried before the KV load counts as failed."""
    lease_s: float = 30.0
    """How long a prefill engine keeps blocks that nobody fetches."""
    load_s: float = 0.2
    """Pretended loading of weights before the port opens."""

    def prefill_s(self, tokens: int, done: int = 0) -> float:
        """Cost of computing `tokens` more prompt tokens after `done` earlier ones, without the floor."""
        end = done + tokens
        return self.prefill_token_s * tokens + self.prefill_token2_s * (end * end - done * done)

    def decode_s(self, sequences: int, context: int) -> float:
        """Length of a step without prefill for `sequences` >= 1 that hold `context` tokens together."""
        return (
            self.decode_floor_s + self.decode_sequence_s * (sequences - 1) + self.decode_context_s * context
        )

    def ttft_aggregated_s(self, prompt: int) -> float:
        """Closed form of the mean TTFT of one request alone on an aggregated engine (calibration page, c = 1)."""
        return self.hop_s + max(self.prefill_floor_s, self.prefill_s(prompt)) + self.jitter_s

    def ttft_pd_s(self, prompt: int, link: str) -> float:
        """Closed form of the mean TTFT of one request alone on a disaggregated system (calibration page, c = 1)."""
        transfer = prompt * self.kv_bytes_per_token / self.links[link].bytes_per_s
        return self.ttft_aggregated_s(prompt) + transfer + self.pd_hop_s + self.decode_s(1, prompt)

    def tpot_s(self, prompt: int, output: int) -> float:
        """Closed form of the mean time per output token of one request alone (calibration page, c = 1)."""
        return self.decode_s(1, prompt) + self.decode_context_s * output / 2

    def slowed(self, factor: float) -> Profile:
        """The same machine with all its own durations times `factor`: how one launch differs from the next."""
        return replace(
            self,
            prefill_floor_s=self.prefill_floor_s * factor,
            prefill_token_s=self.prefill_token_s * factor,
            prefill_token2_s=self.prefill_token2_s * factor,
            decode_floor_s=self.decode_floor_s * factor,
            decode_sequence_s=self.decode_sequence_s * factor,
            decode_context_s=self.decode_context_s * factor,
        )


H100_QWEN3_32B = Profile(
    # Fitted to the published H100 table; kv_blocks is an estimate: 2 x 80 GB x 0.90 less weights and activations.
    name="h100-qwen3-32b",
    hop_s=0.01723849870638826,
    pd_hop_s=0.009940443716020904,
    prefill_floor_s=0.03675519040625361,
    prefill_token_s=5.7e-05,
    prefill_token2_s=7.97724106205121e-10,
    decode_floor_s=0.01335,
    decode_sequence_s=8.717200805775615e-05,
    decode_context_s=5.375663934491907e-08,
    jitter_s=0.0011353942149538465,
    links=MappingProxyType(
        {
            "tcp": Link(2864322989.019048, congestion=0.05896288778302344),
            "rdma": Link(21629114447.991787),
        }
    ),
    default_link="tcp",
    kv_blocks=18_000,
    handshake_s=1.0,
    load_s=1.0,
)

FAST = Profile(
    # No machine: short enough that a whole quick workload passes in seconds, with the proportions of a real one.
    name="fast",
    hop_s=0.004,
    pd_hop_s=0.003,
    prefill_floor_s=0.008,
    prefill_token_s=4.0e-05,
    prefill_token2_s=2.0e-10,
    decode_floor_s=0.005,
    decode_sequence_s=3.0e-05,
    decode_context_s=2.0e-08,
    jitter_s=0.0001,
    links=MappingProxyType(
        {
            "tcp": Link(16.0e9, congestion=0.03),
            "rdma": Link(24.0e9),
            "nvlink": Link(60.0e9),
        }
    ),
    default_link="tcp",
    kv_blocks=16_384,
    handshake_s=0.1,
    handshake_timeout_s=0.5,
    load_s=0.1,
)

PROFILES: Mapping[str, Profile] = MappingProxyType({p.name: p for p in (H100_QWEN3_32B, FAST)})


def profile_named(name: str) -> Profile:
    """The timing profile of that name; UsageProblem with the nearest ones otherwise."""
    if name in PROFILES:
        return PROFILES[name]
    near = difflib.get_close_matches(name, PROFILES, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    raise UsageProblem(
        f"simulated engine: no timing profile {name!r}{hint} (there are: {', '.join(sorted(PROFILES))})"
    )


def link_named(profile: Profile, transport: str) -> str:
    """The profile's link for a transport (`auto` takes its default); UsageProblem when it has none."""
    if transport == "auto":
        return profile.default_link
    if transport in profile.links:
        return transport
    raise UsageProblem(
        f"kv_transfer.transport: profile {profile.name!r} was not calibrated for {transport!r}; "
        f"it knows {', '.join(sorted(profile.links))} (or auto)"
    )
