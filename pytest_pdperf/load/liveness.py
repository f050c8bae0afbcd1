"""Servers may end a kept-alive connection without saying so: know it before a request is lost on it."""

from __future__ import annotations

import socket
import ssl


def peer_waits(sock: socket.socket | ssl.SSLSocket) -> bool:
    """Whether the peer of an idle connection has neither closed it nor sent anything, as the kernel knows by now.

    Of a TLS connection nothing is known: what has arrived may be the protocol's own.
    """
    if isinstance(sock, ssl.SSLSocket):
        return True
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
