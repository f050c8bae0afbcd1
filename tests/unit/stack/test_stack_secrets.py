"""Secrets are masked wherever they may appear, and ordinary output is left alone."""

from __future__ import annotations

import pytest

from pytest_pdperf.stack.secrets import MASK, mask, secret_values


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Bearer abcdef123456", "abcdef123456"),
        ("{'authorization': 'Bearer abcdef123456'}", "abcdef123456"),
        ("authorization=Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("x-api-key: abcd-1234", "abcd-1234"),
        ("--api-key sk_live_123", "sk_live_123"),
        ("--api-key=sk_live_123", "sk_live_123"),
        ("non-default args: {'api_key': ['topsecret1'], 'port': 1}", "topsecret1"),
        ("using token hf_AbCdEfGhIjKlMnOpQrStUv", "hf_AbCdEfGhIjKlMnOpQrStUv"),
        ("key sk-abcdefghijklmnop1234 in use", "sk-abcdefghijklmnop1234"),
        ("ghp_abcdefghijklmnopqrst1234", "ghp_abcdefghijklmnopqrst1234"),
        ("pull from http://user:pa55word@proxy:80/x", "pa55word"),
        ("password=hunter22", "hunter22"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, secret: str) -> None:
    masked = mask(text)
    assert secret not in masked
    assert MASK in masked


@pytest.mark.parametrize(
    "text",
    [
        "Avg prompt throughput: 204.8 tokens/s, Running: 0 reqs",
        "'api_key': None, 'max_num_seqs': 64",
        '"POST /v1/completions HTTP/1.1" 200 OK',
        "Creating v1 connector with name: NixlPullConnector and engine_id: d9bb3e93-d2b7-419a-ae2d-bdca3a5d8dca",
        "id cmpl-___prefill_addr_127.0.0.1:22001___decode_addr_127.0.0.1:22003_b9fdc139d8944ac297fb02faba566991",
        "GPU KV cache size: 743,120 tokens",
        "http://127.0.0.1:8000/v1/models",
    ],
)
def test_ordinary_lines_are_left_alone(text: str) -> None:
    assert mask(text) == text


def test_values_of_secret_variables_are_masked_whatever_they_look_like() -> None:
    env = {
        "HF_TOKEN": "plainword1",
        "AWS_SECRET_ACCESS_KEY": "plainword2",
        "OPENAI_API_KEY": "plainword3",
        "DB_PASSWORD": "plainword4",
        "VLLM_HOST_IP": "plainword5",
        "TOKENIZERS_PARALLELISM": "plainword6",
        "MAX_TOKENS": "plainword7",
        "SHORT_TOKEN": "ab",
        "EMPTY_TOKEN": "",
        "NONE_TOKEN": None,
    }
    values = secret_values(env)
    assert sorted(values) == ["plainword1", "plainword2", "plainword3", "plainword4"]
    assert mask("a plainword3 b plainword5", values) == f"a {MASK} b plainword5"


def test_a_secret_that_contains_another_is_masked_whole() -> None:
    values = secret_values({"A_TOKEN": "secret", "B_TOKEN": "secretlonger"})
    assert mask("secretlonger", values) == MASK
