"""The connectors that a simulated vLLM engine speaks beside NIXL: Mooncake, and the files of ExampleConnector."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from pytest_pdperf.engines.sim.app import SimEngine
from pytest_pdperf.engines.sim.example import ExampleConnector, sought_tokens, stored_tokens
from pytest_pdperf.engines.sim.log import Log
from pytest_pdperf.engines.sim.mooncake import MooncakeConnector, query
from pytest_pdperf.engines.sim.profile import FAST
from pytest_pdperf.engines.sim.request import Limits, Wanted, parse_request
from pytest_pdperf.engines.sim.server import parse_arguments, settings_of
from pytest_pdperf.engines.sim.side_channel import KvLoadError
from pytest_pdperf.engines.sim.tokens import kv_digest
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.evidence.transport import read_transport_log
from tests.integration.sim.sim_processes import free_ports

BLOCK = FAST.block_tokens


def engine(role: str, connector: str, lines: list[str], *options: str) -> SimEngine:
    argv = ["--role", role, "--port", "1", "--served-model-name", "m", "--kv-connector", connector, *options]
    return SimEngine(settings_of(parse_arguments(argv)), Log(lines.append))


def wanted(prompt: int = 64, kv: Mapping[str, object] | None = None) -> Wanted:
    body = {"prompt": list(range(1, prompt + 1)), "max_tokens": 4, "kv_transfer_params": kv}
    return parse_request("completion", json.dumps(body).encode(), Limits("m", 4096, FAST.vocabulary))


# -- Mooncake

GOOD = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_bootstrap_addr": "http://h:1",
    "transfer_id": "x",
}


def mooncake(role: str, lines: list[str], *options: str) -> MooncakeConnector:
    connector = engine(role, "mooncake", lines, *options).connector
    assert isinstance(connector, MooncakeConnector)
    return connector


@pytest.mark.parametrize("missing", ["", *GOOD])
def test_decode_fetches_only_what_it_could_find(missing: str) -> None:
    lines: list[str] = []
    connector = mooncake("decode", lines)
    request = wanted(kv={key: value for key, value in GOOD.items() if key != missing})
    assert connector.offered(request) == (64 if not missing else 0)
    said = any("Got invalid KVTransferParams" in line for line in lines)
    assert said is (missing not in ("", "do_remote_prefill"))


def test_prefill_keeps_nothing_that_could_not_be_asked_for() -> None:
    lines: list[str] = []
    connector = mooncake("prefill", lines, "--side-channel-port", "1", "--bootstrap-port", "2")
    assert connector.keeps({"do_remote_decode": True, "transfer_id": "x"})
    assert not connector.keeps({"transfer_id": "x"})
    assert not lines
    assert not connector.keeps({"do_remote_decode": True})
    assert "Missing transfer_id" in lines[0]


def serving(work: Any, *, ranks: int = 1) -> tuple[SimEngine, list[str]]:
    """Run `await work(prefill engine, its bootstrap address)` while the engine's ports are open."""
    lines: list[str] = []
    side, bootstrap = free_ports(2)
    prefill = engine(
        *("prefill", "mooncake", lines, "--side-channel-port", str(side), "--bootstrap-port", str(bootstrap)),
        *("--tensor-parallel-size", str(ranks), "--kv-transport", "tcp"),
    )

    async def run() -> None:
        await prefill.connector.listen(asyncio.get_running_loop())
        await asyncio.wait_for(work(prefill, f"http://127.0.0.1:{bootstrap}"), 30)

    asyncio.run(run())
    return prefill, lines


def test_the_bootstrap_server_answers_in_the_form_that_routers_read() -> None:
    got: list[Any] = []

    async def ask(prefill: SimEngine, address: str) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            got.append((await http.get(f"{address}/query")).json())
            got.append((await http.get(f"{address}/register")).status_code)
        got.append(await query(address))

    prefill, lines = serving(ask, ranks=2)
    worker = f"tcp://127.0.0.1:{prefill.settings.side_channel_port}"
    assert got[0] == {
        "0": {"engine_id": prefill.engine_id, "worker_addr": {"0": {"0": worker}, "1": {"0": worker}}}
    }
    assert got[1:] == [404, got[0]]
    read = read_transport_log(line for text in lines for line in text.splitlines())
    assert (read.backend, read.families) == ("mooncake", frozenset({"tcp"})), (
        "the suite reads the transport back"
    )


@pytest.mark.parametrize(
    ("address", "engine_id", "lost", "said"),
    [
        ("given", "somebody else", False, "engine somebody else is not registered"),
        ("http://127.0.0.1", "e", False, "remote_bootstrap_addr is"),
        ("closed", "e", True, "bootstrap server"),
    ],
)
def test_what_decode_cannot_find_is_a_failed_load(
    address: str, engine_id: str, lost: bool, said: str
) -> None:
    caught: list[KvLoadError] = []

    async def fetch(prefill: SimEngine, given: str) -> None:
        nobody = f"http://127.0.0.1:{free_ports(1)[0]}"
        where = {"given": given, "closed": nobody}.get(address, address)
        request = wanted(kv=GOOD | {"remote_engine_id": engine_id, "remote_bootstrap_addr": where})
        with pytest.raises(KvLoadError) as problem:
            await mooncake("decode", []).fetch(request)
        caught.append(problem.value)

    serving(fetch)
    assert said in str(caught[0])
    assert caught[0].peer_lost is lost


def test_a_bootstrap_server_that_talks_nonsense_is_given_up() -> None:
    async def nonsense() -> None:
        async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n<html>")
            writer.close()

        server = await asyncio.start_server(rude, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(KvLoadError, match="bootstrap server"):
            await query(f"http://127.0.0.1:{port}")
        server.close()

    asyncio.run(asyncio.wait_for(nonsense(), 30))


# -- ExampleConnector


@pytest.mark.parametrize(
    ("prompt", "stored", "sought"),
    [
        (1, 0, 0),
        (16, 0, 0),
        (17, 16, 0),
        (18, 16, 16),
        (32, 16, 16),
        (33, 32, 16),
        (34, 32, 32),
        (300, 288, 288),
    ],
)
def test_whole_blocks_are_stored_and_one_length_of_each_block_is_never_found(
    prompt: int, stored: int, sought: int
) -> None:
    assert stored_tokens(prompt, 16) == stored
    assert sought_tokens(prompt, 16) == sought


class Store:
    """A prefill and a decode engine over one folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder / "kv"
        where = ("--shared-storage-path", str(self.folder))
        self.prefill = engine("prefill", "example", [], *where, *options)
        self.decode = engine("decode", "example", [], *where)

    async def listen(self) -> None:
        await self.prefill.connector.listen(asyncio.get_running_loop())

    def keep(self, prompt: int) -> None:
        answer: Any = type("Answered", (), {"wanted": wanted(prompt)})
        assert isinstance(self.prefill.connector, ExampleConnector)
        assert self.prefill.connector.kept(answer) is None, "the answer says nothing of it"


def over(folder: Path, work: Any, *options: str) -> None:
    async def run() -> None:
        store = Store(folder, *options)
        await store.listen()
        await work(store, store.decode.connector)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_decode_finds_the_whole_blocks_of_a_prompt_and_of_no_other(tmp_path: Path) -> None:
    async def work(store: Store, decode: ExampleConnector) -> None:
        assert decode.offered(wanted(40)) == 0, "nothing is stored yet"
        store.keep(40)
        assert decode.offered(wanted(40)) == 2 * BLOCK
        assert decode.offered(wanted(39)) == 2 * BLOCK, "it has the same beginning"
        assert decode.offered(wanted(56)) == 0
        pulled = await decode.fetch(wanted(40))
        assert (pulled.tokens, pulled.size) == (2 * BLOCK, 2 * BLOCK * FAST.kv_bytes_per_token)
        assert pulled.digest == kv_digest(range(1, 41)), "with the rest computed it is the prompt's KV"
        assert pulled.ended_s > pulled.began_s

    over(tmp_path, work)


def test_a_prompt_of_less_than_a_block_leaves_nothing_to_fetch(tmp_path: Path) -> None:
    async def work(store: Store, decode: ExampleConnector) -> None:
        store.keep(16)
        assert decode.offered(wanted(16)) == 0

    over(tmp_path, work)


def test_damaged_files_give_other_tokens_and_lost_ones_fail_the_load(tmp_path: Path) -> None:
    async def work(store: Store, decode: ExampleConnector) -> None:
        store.keep(40)
        (file,) = store.folder.glob("*/*")
        file.write_bytes(file.read_bytes()[::-1])
        assert (await decode.fetch(wanted(40))).digest != kv_digest(range(1, 41))
        file.unlink()
        with pytest.raises(KvLoadError, match="cannot be read"):
            await decode.fetch(wanted(40))

    over(tmp_path, work)


def test_a_dropped_transfer_is_a_prompt_that_is_not_there(tmp_path: Path) -> None:
    async def work(store: Store, decode: ExampleConnector) -> None:
        store.keep(40)
        assert decode.offered(wanted(40)) == 0

    over(tmp_path, work, "--faults", "drop_transfer=1")


# -- command lines


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--role", "prefill", "--kv-connector", "mooncake", "--side-channel-port", "1"], "--bootstrap-port"),
        (["--role", "decode", "--kv-connector", "example"], "--shared-storage-path"),
    ],
)
def test_what_a_connector_needs_is_asked_for(options: list[str], said: str) -> None:
    with pytest.raises(UsageProblem, match=said):
        settings_of(parse_arguments(["--port", "1", "--served-model-name", "m", *options]))


@pytest.mark.parametrize("connector", ["nixl", "mooncake", "example"])
def test_only_nixl_has_transfers_on_its_page(connector: str, tmp_path: Path) -> None:
    page = engine("decode", connector, [], "--shared-storage-path", str(tmp_path))._exposition().decode()
    assert ("vllm:nixl_" in page) is (connector == "nixl")
    assert 'source="external_kv_transfer"' in page, "every connector's tokens are counted by source"


def test_failures_are_worded_and_counted_as_each_connector_does(tmp_path: Path) -> None:
    where: Mapping[str, tuple[str, ...]] = {"example": ("--shared-storage-path", str(tmp_path))}
    said = {}
    for name in ("nixl", "mooncake", "example"):
        one = engine("decode", name, [], *where.get(name, ()))
        line = one.connector.failed("r", KvLoadError("gone", peer_lost=True))
        said[name] = (one.metrics.failed_transfers, one.metrics.failed_notifications, line.split(":")[0])
    assert said == {
        "nixl": (2, 1, "NIXL transfer failure"),
        "mooncake": (1, 0, "pulling kv_caches for ['r'] failed"),
        "example": (0, 0, "loading the KV of request r failed"),
    }
