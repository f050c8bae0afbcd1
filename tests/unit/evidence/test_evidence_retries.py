"""Second tries are counted wherever somebody saw them, and once."""

from __future__ import annotations

import pytest

from pytest_pdperf.evidence.access_log import Posts, judge_posts
from pytest_pdperf.evidence.exposition import Snapshot, Unknown, parse_exposition
from pytest_pdperf.evidence.record import Evidence, Status
from pytest_pdperf.evidence.retries import router_retries, with_retries
from pytest_pdperf.spec.topology import Role

ALONE = {"server-0": Role.SERVER}
PAIR = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}


def page(text: str) -> Snapshot:
    found = parse_exposition(text)
    assert isinstance(found, Snapshot), found
    return found


OTHER = "smg_http_requests_total 3\n"


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        (OTHER, OTHER, None),
        (OTHER, OTHER + 'vllm_router_retries_total{route="/v1/completions"} 2\n', 2),
        ('vllm_router_retries_total{route="a"} 5\n', 'vllm_router_retries_total{route="a"} 5\n', 0),
        (
            'smg_worker_retries_total{worker_type="prefill",endpoint="completions"} 1\n'
            'smg_worker_retries_total{worker_type="decode",endpoint="completions"} 1\n',
            'smg_worker_retries_total{worker_type="prefill",endpoint="completions"} 4\n'
            'smg_worker_retries_total{worker_type="decode",endpoint="completions"} 4\n',
            3,
        ),
        (
            OTHER,
            'smg_worker_retries_total{worker_type="regular",endpoint="completions"} 2\n'
            'smg_worker_retries_total{worker_type="regular",endpoint="chat"} 1\n',
            3,
        ),
    ],
    ids=["no counter", "first of all", "none in the window", "both legs of a request", "two endpoints"],
)
def test_what_the_router_counts(before: str, after: str, count: float | None) -> None:
    assert router_retries(page(before), page(after)) == count


def test_a_page_that_is_not_there_or_starts_again_is_no_zero() -> None:
    text = "vllm_router_retries_total 5\n"
    assert router_retries(None, page(text)) is None
    assert router_retries(page(text), Unknown("gone")) is None
    assert isinstance(router_retries(page(text), page("vllm_router_retries_total 1\n")), Unknown)


def evidence(retries: float | None) -> Evidence:
    return Evidence("pd", Status.PROVEN, "proven: 4 of 4", 4, 4, retries=retries)


def test_the_largest_witness_counts_and_marks_the_cell() -> None:
    logged = judge_posts({"prefill-0": Posts(6), "decode-0": Posts(4)}, PAIR, 4)
    assert (logged.retries, logged.status) == (2, "pd")
    assert judge_posts({"prefill-0": Posts(4), "decode-0": Posts(5)}, PAIR, 4).retries == 1
    found = with_retries(evidence(None), None, logged)
    assert (found.retries, found.valid) == (2, False)
    assert found.problems == ("access logs show 2 more requests on a role than were sent: retries",)
    assert with_retries(evidence(0.0), None, logged).problems == (), "counters know better than a log window"
    router = with_retries(evidence(1.0), 3.0, None)
    assert (router.retries, router.problems) == (
        3,
        ("the router tried 3 times again: such prompts were prefilled twice",),
    )
    assert with_retries(evidence(3.0), 3.0, None).problems == (), "the engines' count said it already"
    quiet = with_retries(
        evidence(None), 0.0, judge_posts({"prefill-0": Posts(4), "decode-0": Posts(4)}, PAIR, 4)
    )
    assert (quiet.retries, quiet.valid) == (0, True)
    assert with_retries(evidence(None), Unknown("restarted"), None).retries is None


def test_servers_without_roles_are_counted_too() -> None:
    found = judge_posts({"server-0": Posts(5)}, ALONE, 4)
    assert (found.status, found.retries, found.detail) == ("aggregated", 1, "5 of 4")
    assert found.problems == ("server answered 1 more requests than were sent: retries",)
    assert judge_posts({"server-0": Posts(3, 1)}, ALONE, 4).problems == (
        "server-0: 1 failed requests",
        "server answered 3 of 4 requests",
    )
    assert judge_posts({"server-0": Posts(4)}, ALONE, 4).problems == ()
