"""Where connections go when a name has more than one address."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from pytest_pdperf.load.pool import resolve
from pytest_pdperf.load.target import Target


def test_a_name_with_several_addresses_stands_for_the_one_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        addresses = [deaf.getsockname(), server.getsockname()]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]

        def lookup(*args: Any, **kwargs: Any) -> Any:
            return found

        monkeypatch.setattr(socket, "getaddrinfo", lookup)
        assert resolve(Target("http://two.example", "m")) == (socket.AF_INET, addresses[1])
        found.pop()
        assert resolve(Target("http://one.example", "m")) == (socket.AF_INET, addresses[0]), (
            "a lone one is not tried"
        )
