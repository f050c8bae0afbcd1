"""Every fault and every broken transfer of a simulated engine, seen from outside through real sockets."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.integration.sim.sim_processes import House, Process, body, house, post, prefill_leg, stream, until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with house(tmp_path_factory.mktemp("faults")) as started:
        yield started


@pytest.fixture(scope="module")
def prefill(opened: House) -> Process:
    return opened.engine("prefill")


@pytest.fixture(scope="module")
def decode(opened: House) -> Process:
    return opened.engine("decode")


@pytest.fixture(scope="module")
def server(opened: House) -> Process:
    return opened.engine("server")


def prompt(seed: int, length: int = 100) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(150_000) for _ in range(length)]


def leg(prefill: Process, request: dict[str, object], **changed: object) -> dict[str, object]:
    """The decode leg of a request, with some transfer parameters changed."""
    return request | {"kv_transfer_params": prefill_leg(prefill.url, request) | changed}


def test_the_prefill_answer_has_the_fields_of_the_real_one(prefill: Process) -> None:
    params = prefill_leg(prefill.url, body(prompt(0, 50), 4))
    assert set(params) == {
        *(
            "do_remote_prefill",
            "do_remote_decode",
            "remote_block_ids",
            "remote_engine_id",
            "remote_request_id",
        ),
        *("remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens"),
        *("remote_blocks_expiry_time", "transfer_mode", "remote_prefill_cached_tokens"),
    }
    assert params["remote_num_tokens"] == 50
    assert params["remote_port"] == prefill.side_channel
    assert params["do_remote_prefill"] is True
    groups = params["remote_block_ids"]
    assert isinstance(groups, list)
    assert [len(blocks) for blocks in groups] == [4]


def test_transferred_kv_decides_the_tokens(prefill: Process, decode: Process, server: Process) -> None:
    one, other = body(prompt(1), 10), body(prompt(2), 10)
    expected = stream(server.url, one).tokens
    assert stream(decode.url, leg(prefill, one)).tokens == expected
    mixed_up = other | {"kv_transfer_params": prefill_leg(prefill.url, one)}
    assert stream(decode.url, mixed_up).tokens == expected, "decode believes the KV, not the prompt"


def test_without_transfer_parameters_decode_computes_the_prompt_itself(
    decode: Process, server: Process
) -> None:
    before = decode.metrics()
    request = body(prompt(3), 5)
    assert stream(decode.url, request).tokens == stream(server.url, request).tokens
    after = decode.metrics()
    source = "prompt_tokens_by_source_total{source=local_compute}"
    assert after[source] - before[source] == 100
    assert after["external_prefix_cache_queries_total"] == before["external_prefix_cache_queries_total"]


@pytest.mark.parametrize(
    "changed",
    [
        {"remote_engine_id": "somebody-else"},
        {"remote_request_id": "cmpl-never-seen"},
        {"remote_host": None},
    ],
    ids=["engine", "request", "no-host"],
)
def test_a_failed_load_is_a_200_with_an_error_event_or_a_500(
    prefill: Process, decode: Process, changed: dict[str, object]
) -> None:
    before = decode.metrics()
    streamed = stream(decode.url, leg(prefill, body(prompt(4), 5), **changed))
    assert streamed.status == 200
    assert streamed.error == {
        "message": "Internal server error",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
    assert streamed.done
    assert streamed.choices == []
    whole = post(decode.url, leg(prefill, body(prompt(5), 5), **changed))
    assert whole.status_code == 500
    assert whole.json()["error"]["message"] == "Internal server error"
    after = decode.metrics()
    assert after["nixl_num_failed_transfers_total"] - before["nixl_num_failed_transfers_total"] == 2
    failed = "request_success_total{finished_reason=error}"
    assert after[failed] - before[failed] == 2
    assert after["kv_cache_usage_perc"] == 0
    assert stream(decode.url, leg(prefill, body(prompt(6), 5))).finish == "length", "the engine survives"


def test_a_known_engine_is_found_in_spite_of_a_wrong_port(prefill: Process, decode: Process) -> None:
    assert stream(decode.url, leg(prefill, body(prompt(7), 5))).finish == "length"
    assert stream(decode.url, leg(prefill, body(prompt(8), 5), remote_port=1)).finish == "length"


def test_kv_can_be_fetched_once(prefill: Process, decode: Process) -> None:
    request = leg(prefill, body(prompt(9), 5))
    assert stream(decode.url, request).finish == "length"
    until(lambda: stream(decode.url, request).error is not None, "once released, it is gone")


def test_a_dead_prefill_engine_fails_the_load_and_counts_more_than_once(
    opened: House, decode: Process
) -> None:
    doomed = opened.engine("prefill")
    assert stream(decode.url, leg(doomed, body(prompt(10), 3))).finish == "length"
    request = leg(doomed, body(prompt(11), 3))
    doomed.popen.kill()
    doomed.popen.wait(15)
    before = decode.metrics()
    assert stream(decode.url, request).error is not None
    after = decode.metrics()
    assert after["nixl_num_failed_transfers_total"] - before["nixl_num_failed_transfers_total"] == 2
    assert after["nixl_num_failed_notifications_total"] - before["nixl_num_failed_notifications_total"] == 1
    unknown = request["kv_transfer_params"] | {"remote_engine_id": "new"}  # type: ignore[operator]
    assert stream(decode.url, request | {"kv_transfer_params": unknown}).error is not None


def test_recompute_flips_the_evidence_and_nothing_else(opened: House, server: Process) -> None:
    prefill = opened.engine("prefill")
    sick = opened.engine("decode", "--faults", "recompute=every:2")
    for seed in range(20, 24):
        request = body(prompt(seed), 5)
        assert stream(sick.url, leg(prefill, request)).tokens == stream(server.url, request).tokens
    page = sick.metrics()
    assert page["prompt_tokens_by_source_total{source=local_compute}"] == 200
    assert page["prompt_tokens_by_source_total{source=external_kv_transfer}"] == 200
    assert page["external_prefix_cache_hits_total"] == 200
    assert page["external_prefix_cache_queries_total"] == 400
    assert page["nixl_xfer_time_seconds_count"] == 2
    until(lambda: prefill.metrics()["kv_cache_usage_perc"] == 0, "prefill lets go all the same")


def test_faults_of_transfer_and_stream(opened: House, prefill: Process, server: Process) -> None:
    sick = opened.engine("decode", "--faults", "transfer_fail=every:3,corrupt=every:2")
    answers = []
    for seed in range(30, 36):
        request = body(prompt(seed), 6)
        answers.append((stream(sick.url, leg(prefill, request)), stream(server.url, request)))
    assert [answer.error is not None for answer, _ in answers] == [False, False, True] * 2
    # Of the four that arrived every second is damaged: right length, wrong tokens, and no counter that tells.
    arrived = [(a, b) for a, b in answers if a.error is None]
    assert [a.tokens == b.tokens for a, b in arrived] == [True, False, True, False]
    assert all(len(a.tokens) == 6 and a.finish == "length" for a, _ in arrived)
    assert sick.metrics()["nixl_num_failed_transfers_total"] == 2


def test_faults_in_the_answer(opened: House) -> None:
    sick = opened.engine("server", "--faults", "error_in_stream=every:2,short_output=every:3")
    answers = [stream(sick.url, body(prompt(seed), 8)) for seed in range(40, 46)]
    assert [a.error is not None for a in answers] == [False, True] * 3
    assert all(a.done for a in answers)
    assert [len(a.tokens) for a in answers] == [8, 4, 4, 4, 8, 2]
    assert answers[2].finish == "stop"
    assert answers[1].finish is None
    assert post(sick.url, body(prompt(46), 8)).status_code == 200
    assert post(sick.url, body(prompt(47), 8)).status_code == 500


def test_dying_after_so_many_tokens_cuts_the_stream(opened: House) -> None:
    sick = opened.engine("server", "--faults", "die_after_tokens=5")
    with pytest.raises(httpx.RemoteProtocolError):
        stream(sick.url, body(prompt(50), 50))
    assert sick.popen.wait(15) == 1
    assert "die_after_tokens=5 reached" in sick.text()


def test_leaked_blocks_show_after_the_drain(opened: House, prefill: Process) -> None:
    sick = opened.engine("decode", "--faults", "leak=1")
    assert stream(sick.url, leg(prefill, body(prompt(60, 320), 5))).finish == "length"
    page = sick.metrics()
    assert page["num_requests_running"] == 0
    assert page["kv_cache_usage_perc"] == pytest.approx(21 / 16_384)


def test_a_dropped_transfer_hangs_until_the_lease_ends(opened: House, decode: Process) -> None:
    sick = opened.engine("prefill", "--faults", "drop_transfer=1", "--kv-lease-s", "2")
    request = leg(sick, body(prompt(70), 5)) | {"stream": True}
    started = time.monotonic()
    with pytest.raises(httpx.ReadTimeout):
        with httpx.stream(
            "POST", decode.url + "/v1/completions", json=request, timeout=1, trust_env=False
        ) as answer:
            list(answer.iter_lines())
    assert time.monotonic() - started >= 1
    until(lambda: sick.metrics()["nixl_num_kv_expired_reqs_total"] == 1, "the lease ends")
    assert sick.metrics()["kv_cache_usage_perc"] == 0
    assert "Releasing expired KV blocks" in sick.text()
    until(lambda: decode.metrics()["kv_cache_usage_perc"] == 0, "decode has let go of its blocks")


def test_a_slow_start_shows_in_the_log_and_keeps_the_port_closed(opened: House) -> None:
    sick = opened.engine("server", "--faults", "slow_start=2", wait=False)
    until(lambda: "Starting to load model" in sick.text(), "loading has begun")
    assert not sick.answers()
    until(sick.answers, "up in the end")
    text = sick.text()
    stages = (
        "SIMULATED engine",
        "Starting to load model",
        "Loading weights took",
        "Application startup complete",
    )
    places = [text.index(stage) for stage in stages]
    assert places == sorted(places)
    took = float(text.split("Loading weights took ")[1].split()[0])
    assert took >= 2.1


def test_slow_decode_shows_in_the_engines_own_histogram(opened: House) -> None:
    sick = opened.engine("server", "--faults", "decode_step=3")
    well = opened.engine("server")

    def mean_step(process: Process) -> float:
        stream(process.url, body(prompt(80), 20))
        page = process.metrics()
        return page["inter_token_latency_seconds_sum"] / page["inter_token_latency_seconds_count"]

    # Model time, so this holds on a machine of any speed.
    assert mean_step(sick) / mean_step(well) == pytest.approx(3.0, rel=0.02)


def test_policy_recompute_hides_a_failed_load(opened: House, prefill: Process, server: Process) -> None:
    lenient = opened.engine("decode", "--kv-load-failure-policy", "recompute")
    request = body(prompt(90), 5)
    answer = stream(lenient.url, leg(prefill, request, remote_request_id="cmpl-unknown"))
    assert answer.tokens == stream(server.url, request).tokens
    page = lenient.metrics()
    assert page["nixl_num_failed_transfers_total"] == 1
    assert page["prompt_tokens_by_source_total{source=local_compute}"] == 100


def test_sigterm_ends_at_once_even_in_the_middle_of_a_stream(opened: House) -> None:
    process = opened.engine("server")
    request = body(prompt(99), 10_000, stream=True)
    with pytest.raises(httpx.TransportError):
        with httpx.stream(
            "POST", process.url + "/v1/completions", json=request, timeout=60, trust_env=False
        ) as answer:
            for i, _ in enumerate(answer.iter_lines()):
                if i == 3:
                    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(15) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--profile", "fst"], "did you mean 'fast'"),
        (["--faults", "leek=1"], "did you mean 'leak'"),
        (["--kv-transport", "carrier-pigeon"], "carrier-pigeon"),
        (["--num-gpu-blocks", "10"], "cannot hold one request"),
        (["--max-num-batched-tokens", "64"], "no room for prefill"),
    ],
)
def test_bad_options_end_with_status_2_and_a_reason(opened: House, options: list[str], said: str) -> None:
    process = opened.engine("server", *options, wait=False)
    assert process.popen.wait(60) == 2
    assert said in process.text()
    assert "Traceback" not in process.text()


def test_a_port_in_use_is_named(opened: House, server: Process) -> None:
    port = server.url.rsplit(":", 1)[1]
    argv = [*server.args]
    argv[argv.index("--port") + 1] = port
    twin = opened.start(argv, "twin", server.url)
    assert twin.popen.wait(60) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in twin.text()


def test_faults_come_and_go_in_an_engine_that_is_up(opened: House) -> None:
    engine = opened.engine("server")

    def become(text: str) -> httpx.Response:
        return httpx.post(engine.url + "/simulator/faults", content=text, timeout=20, trust_env=False)

    def mean_step() -> float:
        before = engine.metrics()
        stream(engine.url, body(prompt(110), 20))
        after = engine.metrics()
        name = "inter_token_latency_seconds"
        return (after[f"{name}_sum"] - before[f"{name}_sum"]) / (
            after[f"{name}_count"] - before[f"{name}_count"]
        )

    healthy = mean_step()
    assert become("decode_step=3,short_output=every:2").json() == {"faults": ["decode_step", "short_output"]}
    assert mean_step() / healthy == pytest.approx(3.0, rel=0.05)
    assert stream(engine.url, body(prompt(111), 20)).finish == "stop", "occasions count from the change on"
    assert become("throttle=2:0").status_code == 200
    assert mean_step() / healthy == pytest.approx(2.0, rel=0.05)
    refused = become("leek=1")
    assert refused.status_code == 400
    assert "did you mean 'leak'" in refused.text
    assert httpx.get(engine.url + "/simulator/faults", timeout=20, trust_env=False).status_code == 405
    assert become("").json() == {"faults": []}
    assert mean_step() / healthy == pytest.approx(1.0, rel=0.05)
    assert become("die_after_tokens=3").status_code == 200
    with pytest.raises(httpx.RemoteProtocolError):
        stream(engine.url, body(prompt(112), 50))
    assert engine.popen.wait(15) == 1
