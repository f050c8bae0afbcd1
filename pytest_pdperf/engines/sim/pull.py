"""What NIXL and Mooncake have in common: prefill keeps KV and answers a side channel, decode asks for it there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pytest_pdperf.spec.roles import Role

from .connector import Parts, call_later
from .kv_store import KvStore
from .side_channel import PrefillPeers, SideChannelServer


class PullEnds:
    """Both ends of a pull; an engine uses the one of its role."""

    def __init__(
        self,
        parts: Parts,
        *,
        connected: Callable[[str], str],
        sends: bool = False,
        on_sent: Callable[[float, int, int], None] = lambda seconds, size, blocks: None,
    ) -> None:
        """`connected` gives decode's log line once it knows a prefill engine; the rest is as `KvStore` has it."""
        settings, profile = parts.settings, parts.settings.profile
        self._settings = settings
        self.store = KvStore(
            parts.runner,
            parts.metrics,
            parts.log,
            engine_id=parts.engine_id,
            bytes_per_token=profile.kv_bytes_per_token,
            lease_s=settings.lease_s,
            call_later=call_later,
            drop_transfer=parts.drop_transfer,
            sends=sends,
            on_sent=on_sent,
        )
        self.peers = PrefillPeers(
            handshake_s=profile.handshake_s,
            timeout_s=profile.handshake_timeout_s,
            clock=parts.clock,
            on_handshake=lambda peer: parts.log.info(connected(peer)),
        )

    async def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open prefill's side channel. Raises OSError for a port that is taken."""
        if self._settings.role is Role.PREFILL:
            await loop.create_server(
                lambda: SideChannelServer(self.store.handle),
                self._settings.host,
                self._settings.side_channel_port,
            )
