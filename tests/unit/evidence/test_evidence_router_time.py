"""A router that times itself closes the way from client to first token; one that does not says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_pdperf.evidence.deltas import HistogramDelta
from pytest_pdperf.evidence.exposition import Snapshot, Unknown, parse_exposition
from pytest_pdperf.evidence.names import Quantity
from pytest_pdperf.evidence.readings import observations
from pytest_pdperf.evidence.router_time import HEAD as NAME
from pytest_pdperf.evidence.router_time import LEG, RouterTime, router_time
from pytest_pdperf.evidence.ttft_split import TtftSplit, split_ttft
from pytest_pdperf.spec.topology import Role

DATA = Path(__file__).parents[2] / "data" / "evidence"


def page(text: str) -> Snapshot:
    found = parse_exposition(text)
    assert isinstance(found, Snapshot), found
    return found


def router(count: int, seconds: float, route: str = "/v1/completions", others: int = 3) -> Snapshot:
    return page(
        f"# TYPE {NAME} histogram\n"
        f'{NAME}_bucket{{route="{route}",le="+Inf"}} {count}\n'
        f'{NAME}_sum{{route="{route}"}} {seconds}\n{NAME}_count{{route="{route}"}} {count}\n'
        f'{NAME}_bucket{{route="/tokenize",le="+Inf"}} {others}\n'
        f'{NAME}_sum{{route="/tokenize"}} 99.0\n{NAME}_count{{route="/tokenize"}} {others}\n'
    )


def leg(count: int, seconds: float) -> Snapshot:
    return page(
        f'# TYPE {LEG} summary\n{LEG}{{quantile="0.5"}} 1\n{LEG}_sum {seconds}\n{LEG}_count {count}\n'
    )


def head_ms(before: Snapshot, after: Snapshot) -> float | None:
    found = router_time(before, after, 10)
    assert isinstance(found, RouterTime), found
    return found.head_ms


def test_the_mean_is_of_the_windows_requests_alone() -> None:
    assert head_ms(router(4, 1.0), router(14, 1.5, others=9)) == pytest.approx(50.0)
    chat = "/v1/chat/completions"
    assert head_ms(router(4, 1.0, chat), router(14, 1.5, chat)) == pytest.approx(50.0)
    first = head_ms(page("up 1\n"), router(10, 0.5))
    assert first == pytest.approx(50.0), "the histogram is printed from its first request on"
    assert router_time(leg(4, 1.0), leg(14, 1.5), 10) == RouterTime(leg_ms=pytest.approx(50.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (None, None, "was not read"),
        (Unknown("refused"), router(4, 1.0), "refused"),
        (router(4, 1.0), Unknown("HTTP 404"), "HTTP 404"),
        (page("up 1\n"), page("up 1\n"), "is not on its page"),
        (router(4, 1.0), router(13, 1.5), "timed 9 requests, 10 were sent"),
        (router(14, 1.0), router(4, 0.5), "restarted"),
    ],
)
def test_what_is_not_known_says_why(
    before: Snapshot | Unknown | None, after: Snapshot | Unknown | None, words: str
) -> None:
    found = router_time(before, after, 10)
    assert isinstance(found, Unknown)
    assert words in found.reason


def load(name: str) -> Snapshot:
    return page((DATA / name).read_text())


def with_http(name: str, seconds: float) -> Snapshot:
    text = (DATA / name).read_text()
    http = "http_request_duration_seconds"
    labels = 'handler="/v1/completions",method="POST"'
    return page(
        f"{text}# TYPE {http} histogram\n"
        f'{http}_bucket{{{labels},le="+Inf"}} 10\n{http}_sum{{{labels}}} {seconds}\n{http}_count{{{labels}}} 10\n'
    )


def test_clocks_of_router_and_api_servers_take_the_place_of_what_was_measured_idle() -> None:
    """Prefill's engine has 210 of 214 ms of its API server, the router 220 until it asks decode, which takes 2 + 30."""
    roles = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
    before: dict[str, Snapshot | Unknown] = dict.fromkeys(roles, page((DATA / "vllm_idle.prom").read_text()))
    decode_e2e = observations(before["decode-0"], load("vllm_decode.prom"), Quantity.E2E_SECONDS)  # type: ignore[arg-type]
    assert isinstance(decode_e2e, HistogramDelta)

    def split(after: dict[str, Snapshot | Unknown], clocks: RouterTime | None) -> TtftSplit:
        found = split_ttft(
            "pd",
            before,
            after,
            roles,
            measured_ttft_ms=254.0,
            requests=10,
            router_ms=50.0,
            router_time=clocks,
        )
        assert isinstance(found, TtftSplit)
        return found

    timed: dict[str, Snapshot | Unknown] = {
        "prefill-0": with_http("vllm_prefill.prom", 2.14),
        "decode-0": with_http("vllm_decode.prom", decode_e2e.total + 0.02),
    }
    found = split(timed, RouterTime(head_ms=222.0))
    assert found.stages["router"] == pytest.approx(8.0), "decode's parsing is inside"
    assert found.stages["hand_over"] == pytest.approx(7.0 + 4.0)
    assert found.closure_error_ms == pytest.approx(254.0 - 222.0 - 30.0)
    found = split(timed, RouterTime(leg_ms=220.0))
    assert found.stages["router"] == pytest.approx(6.0)
    assert found.stages["hand_over"] == pytest.approx(7.0 + 4.0 + 2.0)
    assert found.closure_error_ms == pytest.approx(254.0 - 220.0 - 32.0)
    assert split(timed, None).stages["router"] == 50.0

    untimed: dict[str, Snapshot | Unknown] = {
        "prefill-0": load("vllm_prefill.prom"),
        "decode-0": load("vllm_decode.prom"),
    }
    found = split(untimed, RouterTime(leg_ms=220.0, head_ms=240.0))
    assert found.stages["router"] == pytest.approx(240.0 - 210.0), (
        "no clock behind the head but the engine's own"
    )
    assert found.stages["hand_over"] == pytest.approx(7.0)
