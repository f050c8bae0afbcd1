"""Connectors by the name that topologies use."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .connector import Connector, Parts
from .example import ExampleConnector
from .mooncake import MooncakeConnector
from .nixl import NixlConnector

CONNECTORS: Mapping[str, Callable[[Parts], Connector]] = {
    "nixl": NixlConnector,
    "mooncake": MooncakeConnector,
    "example": ExampleConnector,
}
