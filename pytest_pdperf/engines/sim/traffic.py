"""What a virtual run sends, and what its clients see of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """One class of clients: `concurrency` of them, each sending its next request when the last has ended."""

    input_tokens: tuple[int, int]
    output_tokens: int
    requests: int
    concurrency: int
    name: str = "main"
    think_s: float = 0.0
    """Pause after an answer, drawn x U(1 - think_spread, 1 + think_spread)."""
    think_spread: float = 0.8
    start_spread_s: float = 0.0
    """First sends are spread over U(0, start_spread_s)."""
    length_sigma: float = 0.0
    """A fixed prompt length is drawn x N(1, length_sigma), as tokenised random text has it."""


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One simulated request. Seconds on the run's clock, which starts at 0; `token_s` as the client sees them."""

    stream: str
    index: int
    prompt_tokens: int
    output_tokens: int
    engine: str
    sent_s: float
    token_s: tuple[float, ...]
    failed: bool = False
    local_prefill: bool = False
    """True when the engine that decoded has computed the prompt too."""

    @property
    def ttft_s(self) -> float:
        """First token after sending."""
        return self.token_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; needs two tokens."""
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)
