"""What goes out on the wire, byte for byte where it matters."""

from __future__ import annotations

import json

import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.load.bodies import body_of, headers_of, http_request
from pytest_pdperf.load.planned import Planned
from pytest_pdperf.load.target import Target

REQUEST = Planned((5, 6, 7), 9)


def target(**changes: object) -> Target:
    return Target(**({"url": "http://127.0.0.1:8000", "model": "m"} | changes))  # type: ignore[arg-type]


def test_completions_body() -> None:
    assert json.loads(body_of(REQUEST, target())) == {
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 9,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_chat_body_has_one_word_a_token() -> None:
    body = json.loads(body_of(REQUEST, target(api="chat", running_usage=True)))
    assert len(body["messages"][0]["content"].split()) == 3
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "prompt" not in body


def test_generate_body_and_extras() -> None:
    body = json.loads(body_of(REQUEST, target(api="generate", extra_body={"priority": 3, "stream": False})))
    assert body == {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 9, "ignore_eos": True, "temperature": 0},
        "stream": False,
        "priority": 3,
    }


def test_every_body_asks_for_a_stream() -> None:
    for api in ("completions", "chat", "generate"):
        assert json.loads(body_of(REQUEST, target(api=api)))["stream"] is True


def test_request_head() -> None:
    raw = http_request(
        b"{}", target(url="http://127.0.0.1:8000/base/"), "id-1", (("Authorization", "Bearer x"),)
    )
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /base/v1/completions HTTP/1.1"
    assert {
        "Host: 127.0.0.1:8000",
        "Content-Length: 2",
        "X-Request-Id: id-1",
        "Authorization: Bearer x",
    } <= set(lines)
    assert not any(line.startswith("Connection") for line in lines)
    assert body == b"{}"
    assert b"Connection: close" in http_request(b"{}", target(keep_alive=False), "id-1")


def test_an_api_key_is_sent_as_a_bearer_token_and_its_job_names_the_variable_only() -> None:
    made = target(key_env="OUR_KEY", ca_file="/ca.pem")
    assert headers_of(made, {"OUR_KEY": "abc"}) == (("Authorization", "Bearer abc"),)
    assert "abc" not in json.dumps(made.to_json())
    assert Target.from_json(json.loads(json.dumps(made.to_json()))) == made
    with pytest.raises(UsageProblem, match="variable OUR_KEY is not set"):
        headers_of(made, {})


def test_secrets_come_from_the_environment_and_stay_out_of_the_job() -> None:
    made = target(headers_from_env={"Authorization": "SERVE_KEY"})
    assert headers_of(made, {"SERVE_KEY": "Bearer abc"}) == (("Authorization", "Bearer abc"),)
    assert "abc" not in json.dumps(made.to_json())
    assert Target.from_json(json.loads(json.dumps(made.to_json()))) == made
    with pytest.raises(UsageProblem, match="variable SERVE_KEY is not set"):
        headers_of(made, {})
    with pytest.raises(UsageProblem, match="not a valid header"):
        headers_of(made, {"SERVE_KEY": "a\r\nX-Evil: b"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "want http://HOST:PORT"),
        ({"url": "ftp://h"}, "want http://HOST:PORT"),
        ({"url": "http://h/?a=1"}, "no query"),
        ({"api": "completion"}, "did you mean 'completions'"),
        ({"vocab": (5, 5)}, "want 0 <= first < last"),
    ],
)
def test_bad_targets(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageProblem, match=message):
        target(**change)


def test_addresses() -> None:
    assert (target(url="http://h").port, target(url="https://h").port, target(url="http://h:7").port) == (
        80,
        443,
        7,
    )
    six = target(url="http://[::1]:9")
    assert (six.host, six.host_header, six.tls) == ("::1", "[::1]:9", False)
