"""SGLang's flow between simulated engines, leg by leg, and what the real routers make of failures."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pytest_pdperf.engines.base import Instance, Ports, Programs
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.evidence.exposition import Snapshot, Unknown
from pytest_pdperf.evidence.names import Quantity
from pytest_pdperf.evidence.readings import change, observations
from pytest_pdperf.evidence.scrape import scrape
from pytest_pdperf.routers.base import RouterInstance
from pytest_pdperf.routers.registry import get_router
from pytest_pdperf.spec.topology import Kind, KvTransfer, Role, RouterSpec
from tests.integration.sim.sim_processes import House, Process, free_ports, house, until

pytestmark = pytest.mark.timeout(300)
HERE = Programs((Path(sys.executable).parent,))
ROOM = 2**63 - 1000


def engine(opened: House, role: str, *options: str) -> Process:
    port, bootstrap = free_ports(2)
    argv = [
        sys.executable,
        "-m",
        "pytest_pdperf.engines.sim.sglang_server",
        "--role",
        role,
        "--port",
        str(port),
    ]
    argv += ["--served-model-name", "m", "--side-channel-port", str(bootstrap), *options]
    process = opened.start(argv, f"{role}-{port}", f"http://127.0.0.1:{port}")
    process.side_channel = bootstrap
    return process


class Pair:
    """A prefill and a decode engine, spoken to like a router does."""

    def __init__(self, opened: House, prefill: tuple[str, ...] = (), decode: tuple[str, ...] = ()) -> None:
        self.opened = opened
        self.prefill = engine(opened, "prefill", *prefill)
        self.decode = engine(opened, "decode", *decode)
        for process in (self.prefill, self.decode):
            until(process.answers, "engines are healthy")
        self.http = httpx.Client(timeout=60, trust_env=False)
        self.pool = ThreadPoolExecutor(64)

    def body(self, room: int, prompt: list[int], n: int = 4, **more: object) -> dict[str, object]:
        return {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": n, "ignore_eos": True, "temperature": 0},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.side_channel,
            "bootstrap_room": room,
            **more,
        }

    def post(self, process: Process, body: Mapping[str, object]) -> Future[httpx.Response]:
        return self.pool.submit(self.http.post, f"{process.url}/generate", json=body)

    def both(self, room: int, prompt: list[int], n: int = 4) -> tuple[httpx.Response, httpx.Response]:
        """The answers of prefill and decode."""
        body = self.body(room, prompt, n)
        legs = self.post(self.prefill, body), self.post(self.decode, body)
        return legs[0].result(), legs[1].result()

    def pages(self) -> dict[str, Snapshot]:
        found = scrape({"prefill": self.prefill.url, "decode": self.decode.url}, 10.0)
        return {name: page for name, page in found.items() if isinstance(page, Snapshot)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with house(tmp_path_factory.mktemp("sglang")) as opened:
        yield Pair(opened)


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[House]:
    with house(tmp_path) as opened:
        yield opened


def prompt(seed: int, length: int = 60) -> list[int]:
    return [(seed * 7919 + i) % 150_000 for i in range(length)]


def samples(process: Process, name: str) -> list[tuple[dict[str, str], float]]:
    page = httpx.get(f"{process.url}/metrics", timeout=20, trust_env=False).text
    return [
        (dict(sample.labels), sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == f"sglang:{name}"
    ]


def test_decode_says_nothing_before_its_prefill_and_prefill_ends_with_the_transfer(pair: Pair) -> None:
    body, got = pair.body(ROOM, prompt(1), 6, stream=True), bytearray()

    def read() -> None:
        with pair.http.stream("POST", f"{pair.decode.url}/generate", json=body) as response:
            assert response.status_code == 200
            for data in response.iter_raw():
                got.extend(data)

    reading = pair.pool.submit(read)
    time.sleep(0.5)
    assert got == b"", "nothing to say yet"
    levels = samples(pair.decode, "num_decode_transfer_queue_reqs")
    assert [value for _, value in levels] == [1.0]
    answer = pair.post(pair.prefill, body | {"stream": False}).result().json()
    reading.result()
    assert answer["meta_info"]["completion_tokens"] == 1
    text = got.decode()
    assert text.endswith("data: [DONE]\n\n")
    assert f'"output_ids":[{answer["output_ids"][0]}]' in text, "decode's first token is the one prefill made"
    assert '"completion_tokens":6' in text


def test_prefill_waits_for_decode_and_then_both_answer(pair: Pair) -> None:
    body = pair.body(ROOM + 1, prompt(2))
    first = pair.post(pair.prefill, body)
    time.sleep(0.4)
    assert not first.done()
    assert [value for _, value in samples(pair.prefill, "num_prefill_bootstrap_queue_reqs")] == [1.0]
    last = pair.post(pair.decode, body).result()
    assert first.result().status_code == last.status_code == 200
    assert last.json()["output_ids"][0] == first.result().json()["output_ids"][0]


def test_rooms_that_a_double_cannot_tell_apart_are_different_rooms(pair: Pair) -> None:
    rooms = [ROOM + 100 + i for i in range(24)]
    assert len({float(room) for room in rooms}) < len(rooms), "the point of this test"
    alone = {room: pair.both(room, prompt(room))[1].json()["output_ids"] for room in rooms}
    assert len({tuple(tokens) for tokens in alone.values()}) == len(rooms)
    legs = {
        room: (pair.post(pair.decode, body), pair.post(pair.prefill, body))
        for room in rooms
        for body in [pair.body(room, prompt(room))]
    }
    together = {room: decode.result().json()["output_ids"] for room, (decode, _) in legs.items()}
    assert together == alone


def test_a_room_belongs_to_one_live_request(pair: Pair) -> None:
    body = pair.body(7, prompt(3))
    first = pair.post(pair.prefill, body)
    until(
        lambda: samples(pair.prefill, "num_prefill_bootstrap_queue_reqs")[0][1] == 1.0,
        "the leg stands in its room",
    )
    second = pair.post(pair.prefill, pair.body(7, prompt(4))).result()
    assert (second.status_code, "bootstrap_room 7" in second.text) == (400, True)
    assert pair.post(pair.decode, body).result().status_code == 200
    assert first.result().status_code == 200


@pytest.mark.parametrize(
    ("role", "queue"),
    [("prefill", "num_prefill_bootstrap_queue_reqs"), ("decode", "num_decode_transfer_queue_reqs")],
)
def test_a_leg_whose_client_leaves_gives_its_room_up(pair: Pair, role: str, queue: str) -> None:
    process = pair.prefill if role == "prefill" else pair.decode
    body = pair.body(ROOM + 900, prompt(9), stream=True)
    with pair.http.stream("POST", f"{process.url}/generate", json=body) as leaving:
        assert leaving.status_code == 200
        until(lambda: samples(process, queue)[0][1] == 1.0, f"{role} waits for the other leg")
    well_before_the_lease_ends = 15
    until(
        lambda: samples(process, queue)[0][1] == 0.0, f"{role} has forgotten it", well_before_the_lease_ends
    )
    until(lambda: samples(process, "token_usage")[0][1] == 0.0, "no block stays", well_before_the_lease_ends)
    assert [leg.status_code for leg in pair.both(ROOM + 900, prompt(10))] == [200, 200]


def test_a_role_alone_refuses_as_sglang_does(pair: Pair) -> None:
    for process in (pair.prefill, pair.decode):
        answer = pair.http.post(f"{process.url}/generate", json={"input_ids": [1, 2]})
        assert answer.status_code == 400
        assert "Disaggregated request received without bootstrap room id" in answer.json()["error"]["message"]


def test_evidence_counts_one_transfer_a_request_and_its_bytes(pair: Pair) -> None:
    before = pair.pages()
    sizes = [40, 200, 333]
    for i, size in enumerate(sizes):
        assert pair.both(ROOM + 500 + i, prompt(i, size))[1].status_code == 200
    after = pair.pages()

    def delta(name: str, quantity: Quantity) -> object:
        return change(before[name], after[name], quantity)

    assert delta("prefill", Quantity.TRANSFERS) == 3
    assert delta("prefill", Quantity.TRANSFER_BYTES) == sum(sizes) * 262_144
    assert delta("prefill", Quantity.PROMPT_TOKENS_COMPUTED) == sum(sizes)
    assert delta("decode", Quantity.PROMPT_TOKENS_COMPUTED) == 0
    assert delta("decode", Quantity.PROMPT_TOKENS) == sum(sizes)
    assert delta("decode", Quantity.GENERATION_TOKENS) == 12
    assert delta("prefill", Quantity.GENERATION_TOKENS) == 3
    for name in ("prefill", "decode"):
        assert delta(name, Quantity.REQUESTS_FINISHED) == 3
        assert isinstance(delta(name, Quantity.FAILED_TRANSFERS), Unknown), "printed from the first one on"
    ttft = observations(before["decode"], after["decode"], Quantity.TTFT_SECONDS)
    waits = observations(before["decode"], after["decode"], Quantity.TRANSFER_WAIT_SECONDS)
    assert getattr(ttft, "count", ttft) == getattr(waits, "count", waits) == 3


def test_what_routers_ask_about_a_worker(pair: Pair) -> None:
    for process, mode in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        info = pair.http.get(f"{process.url}/server_info").json()
        assert info == pair.http.get(f"{process.url}/get_server_info").json()
        assert (info["disaggregation_mode"], info["served_model_name"], info["tp_size"]) == (mode, "m", 1)
        assert info["tokenizer_path"] == "", "a name would be loaded from the network"
        assert pair.http.get(f"{process.url}/model_info").json()["is_generation"] is True
        (load,) = pair.http.get(f"{process.url}/v1/loads?include=core").json()["loads"]
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["max_running_requests"]) == (
            0,
            0,
            64,
        )
        assert pair.http.get(f"{process.url}/get_load").json()[0]["num_reqs"] == 0
        for path in ("/health", "/health_generate"):
            assert pair.http.get(f"{process.url}{path}").status_code == 200
        assert pair.http.get(f"{process.url}/nope").status_code == 404
        assert pair.http.get(f"{process.url}/generate").status_code == 405
        assert process.answers(), "after all of that"


def test_old_metrics_are_gauges_of_the_last_transfer(faulty: House) -> None:
    pair = Pair(faulty, prefill=("--metrics-form", "old"))
    assert pair.both(1, prompt(1))[1].status_code == 200
    ((labels, speed),) = samples(pair.prefill, "kv_transfer_speed_gb_s")
    assert set(labels) == {"engine_type", "model_name", "tp_rank"}
    assert speed > 0
    assert samples(pair.prefill, "kv_transfer_latency_ms_count") == []
    assert samples(pair.decode, "kv_transfer_latency_ms_count") == [], "prefill counts them"


def failures(pair: Pair, requests: int, first_room: int = 1) -> list[tuple[int, int]]:
    """Status of prefill's and of decode's leg of each request."""
    answers = [pair.both(first_room + i, prompt(i)) for i in range(requests)]
    return [(prefill.status_code, decode.status_code) for prefill, decode in answers]


def test_a_failed_transfer_fails_both_legs_and_is_counted(faulty: House) -> None:
    pair = Pair(faulty, decode=("--faults", "transfer_fail=every:4"))
    assert failures(pair, 8) == [(200, 200), (200, 200), (200, 200), (500, 500)] * 2
    assert [value for _, value in samples(pair.decode, "num_transfer_failed_reqs_total")] == [2.0]
    assert "Decode transfer failed for request rank=0" in pair.decode.text()
    until(lambda: samples(pair.prefill, "token_usage")[0][1] == 0.0, "no block stays behind", 30)
    until(lambda: samples(pair.decode, "token_usage")[0][1] == 0.0, "no block stays behind", 30)


def test_a_dropped_transfer_ends_at_the_timeout_with_sglangs_words(faulty: House) -> None:
    lease = ("--kv-lease-s", "1.5")
    pair = Pair(faulty, prefill=("--faults", "drop_transfer=every:2", *lease), decode=("--kv-lease-s", "20"))
    assert failures(pair, 2) == [(200, 200), (500, 500)]
    line = "Request 2 timed out after 1.5s in KVPoll.Transferring"
    assert line in pair.prefill.text()
    assert line in pair.decode.text()
    assert [value for _, value in samples(pair.prefill, "num_transfer_failed_reqs_total")] == [1.0]


@pytest.mark.parametrize(
    ("leases", "stage"), [(("1", "20"), "Bootstrapping"), (("20", "1"), "WaitingForInput")]
)
def test_a_lone_decode_leg_times_out_on_whichever_side_is_first(
    faulty: House, leases: tuple[str, str], stage: str
) -> None:
    pair = Pair(faulty, prefill=("--kv-lease-s", leases[0]), decode=("--kv-lease-s", leases[1]))
    lone = pair.post(pair.decode, pair.body(6, prompt(6))).result()
    assert lone.status_code == 500
    assert f"Request 6 timed out after 1.0s in KVPoll.{stage}" in lone.text


def test_a_lone_prefill_leg_times_out(faulty: House) -> None:
    pair = Pair(faulty, prefill=("--kv-lease-s", "1"))
    lone = pair.post(pair.prefill, pair.body(5, prompt(5))).result()
    assert (lone.status_code, "KVPoll.Bootstrapping" in lone.text) == (500, True)
    assert [value for _, value in samples(pair.prefill, "num_bootstrap_failed_reqs_total")] == [1.0]


def test_corrupt_kv_is_told_by_no_counter_and_no_status(faulty: House) -> None:
    pair = Pair(faulty, decode=("--faults", "corrupt=every:2"))
    answers = [pair.both(room, prompt(1)) for room in (1, 2)]
    assert [decode.status_code for _, decode in answers] == [200, 200]
    right, wrong = (decode.json()["output_ids"] for _, decode in answers)
    assert right != wrong
    assert samples(pair.decode, "num_transfer_failed_reqs_total") == []


def test_prefill_gone_is_an_error_and_not_a_hang(faulty: House) -> None:
    pair = Pair(faulty)
    assert failures(pair, 1) == [(200, 200)]
    pair.prefill.stop()
    answer = pair.post(pair.decode, pair.body(9, prompt(9))).result()
    assert answer.status_code == 500
    assert pair.http.get(f"{pair.decode.url}/health").status_code == 200


def start_router(opened: House, name: str, pair: Pair) -> str:
    """A real router as the launcher starts it; its URL."""
    product = get_router(name)
    try:
        product.check(HERE)
    except UsageProblem as problem:
        pytest.skip(str(problem))
    port, metrics = free_ports(2)
    workers = [
        Instance(
            id=f"{role.value}-0",
            role=role,
            ports=Ports(http=int(process.url.rpartition(":")[2]), bootstrap=process.side_channel),
            devices=(),
            tensor_parallel=1,
            model="fast",
            served_model="m",
            args={},
            env={},
            kv_transfer=KvTransfer(),
        )
        for role, process in ((Role.PREFILL, pair.prefill), (Role.DECODE, pair.decode))
    ]
    instance = RouterInstance(RouterSpec(), Kind.PD, port, metrics, workers, KvTransfer())
    router = opened.start(list(product.command(instance, HERE).argv), name, instance.url)

    def ready() -> bool:
        try:
            answer = httpx.get(instance.url + product.ready_path(instance), timeout=5, trust_env=False)
            return answer.status_code == 200 and product.sees_all_workers(instance, answer.json())
        except httpx.TransportError:
            assert router.popen.poll() is None, router.text()
            return False

    until(ready, f"{name} sees both workers")
    return instance.url


def tokens(answer: httpx.Response) -> Any:
    return answer.json()["output_ids"]


@pytest.mark.parametrize("name", ["sglang_router", "smg"])
def test_a_failed_request_is_an_error_at_the_client_and_is_tried_once(faulty: House, name: str) -> None:
    pair = Pair(faulty, decode=("--faults", "transfer_fail=every:3"))
    url = start_router(faulty, name, pair)
    body = {"input_ids": prompt(4), "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    answers = [pair.http.post(f"{url}/generate", json=body) for _ in range(6)]
    assert [answer.status_code >= 500 for answer in answers] == [False, False, True] * 2
    assert len({tuple(tokens(answer)) for answer in answers if answer.status_code == 200}) == 1
    posts = [line for line in pair.decode.text().splitlines() if '"POST /generate' in line]
    assert len(posts) == 6, "no second attempt hides the first"
    text = pair.http.post(f"{url}/v1/completions", json={"model": "m", "prompt": [1, 2, 3], "max_tokens": 2})
    assert text.status_code in (400, 422), "token ids do not get through here"
