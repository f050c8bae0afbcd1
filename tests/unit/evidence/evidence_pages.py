"""Pages of a prefill and a decode engine around a clean cell of ten requests, and what the verdict says of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_pdperf.evidence.exposition import Snapshot, Unknown, parse_exposition
from pytest_pdperf.evidence.record import Evidence, Expected
from pytest_pdperf.evidence.verdict import judge_evidence
from pytest_pdperf.spec.topology import Kind, Role

DATA = Path(__file__).parents[2] / "data" / "evidence"


SAMPLES = Path(__file__).parents[4] / "shared" / "samples"


ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}


SENT = Expected(requests=10, prompt_tokens=40960, completion_tokens=1280)


Pages = dict[str, Snapshot | Unknown]


def snap(text: str) -> Snapshot:
    page = parse_exposition(text)
    assert isinstance(page, Snapshot), page
    return page


def text_of(name: str) -> str:
    return (DATA / name).read_text()


def pages(prefill: str, decode: str) -> Pages:
    return {"prefill-0": snap(prefill), "decode-0": snap(decode)}


IDLE = text_of("vllm_idle.prom")


BEFORE = pages(IDLE, IDLE)


AFTER = pages(text_of("vllm_prefill.prom"), text_of("vllm_decode.prom"))


def edited(name: str, *edits: tuple[str, str]) -> str:
    text = text_of(name)
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


def judge(
    after: Mapping[str, Snapshot | Unknown], expected: Expected = SENT, before: Pages | None = None
) -> Evidence:
    return judge_evidence(Kind.PD, before or BEFORE, after, expected, ROLES, wall_s=2.0)


def without(text: str, *words: str) -> str:
    return "".join(line + "\n" for line in text.splitlines() if not any(word in line for word in words))
