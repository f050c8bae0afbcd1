"""Who answered how many requests, from access lines."""

from __future__ import annotations

import pytest

from pytest_pdperf.evidence.access_log import Posts, count_posts, judge_posts, parse_access_line
from pytest_pdperf.spec.topology import Role

PLAIN = 'INFO:     192.0.2.10:40001 - "{request} HTTP/1.1" {status}'
PREFIXES = ("", "(APIServer pid=7) ", "[2026-01-02 03:04:05] ")
ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}


def post(status: str = "200 OK", prefix: str = "", path: str = "/v1/completions") -> str:
    return prefix + PLAIN.format(request=f"POST {path}", status=status)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_three_prefixes_of_one_line(prefix: str) -> None:
    parsed = parse_access_line(post("500 Internal Server Error", prefix, "/generate"))
    assert parsed is not None
    assert (parsed.method, parsed.path, parsed.status, parsed.work) == ("POST", "/generate", 500, True)


def test_only_requests_for_tokens_are_work() -> None:
    lines = [
        *[post()] * 3,
        PLAIN.format(request="GET /health", status="200 OK"),
        PLAIN.format(request="GET /metrics", status="200 OK"),
        post(path="/tokenize"),
        post("500 Internal Server Error"),
        "INFO: nothing of interest",
    ]
    assert count_posts(lines) == Posts(ok=3, failed=1)
    assert count_posts(lines, skip=2) == Posts(ok=1, failed=1)
    assert count_posts(lines, skip=9).ok == 0


def test_imbalance_and_a_failed_prefill() -> None:
    posts = {
        "decode-0": count_posts(
            [*[post()] * 19, *[PLAIN.format(request="GET /health", status="200 OK")] * 3]
        ),
        "decode-1": count_posts([post(prefix=PREFIXES[1])]),
        "prefill-0": count_posts(
            [*[post(prefix=PREFIXES[2])] * 20, post("500 Internal Server Error", PREFIXES[2])]
        ),
    }
    found = judge_posts(posts, ROLES, sent=20)
    assert found.decode_imbalance == 1.9
    assert found.status == "pd"
    assert found.retries == 1, "the failed one was tried again"
    assert found.problems == (
        "prefill-0: 1 failed requests",
        "prefill answered 1 more requests than were sent: retries",
    )
    assert found.notes == ("decode imbalance 1.9 > 1.25",)


@pytest.mark.parametrize(
    ("prefill", "status", "words"),
    [(0, "decode_only", "not a PD measurement"), (20, "pd", ""), (13, "mixed", "prefill answered 13 of 20")],
)
def test_short_prompts_that_skip_prefill(prefill: int, status: str, words: str) -> None:
    roles = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
    found = judge_posts({"prefill-0": Posts(prefill), "decode-0": Posts(20)}, roles, sent=20)
    assert found.status == status
    assert words in " ".join(found.problems)
    assert bool(found.problems) == (status != "pd")


def test_holes_and_retries() -> None:
    roles = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
    assert judge_posts({"decode-0": Posts(20)}, roles, 20).status == "unknown"
    assert (
        judge_posts({"prefill-0": None, "decode-0": Posts(20)}, roles, 20).detail
        == "no access log of prefill-0"
    )
    found = judge_posts({"prefill-0": Posts(21), "decode-0": Posts(20)}, roles, 20)
    assert found.problems == ("prefill answered 1 more requests than were sent: retries",)
    lost = judge_posts({"prefill-0": Posts(20), "decode-0": Posts(19)}, roles, 20)
    assert lost.problems == ("decode answered 19 of 20 requests",)
