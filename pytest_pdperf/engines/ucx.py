"""How a KV transport is forced upon UCX, which carries NIXL's transfers for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

UCX_ENV: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "auto": {},
        "tcp": {"UCX_TLS": "tcp,cuda_copy,sm,self"},
        "rdma": {"UCX_TLS": "rc,cuda_copy,sm,self"},
        "nvlink": {"UCX_TLS": "cuda_ipc,cuda_copy,tcp,sm,self"},
    }
)
"""Transport -> UCX settings; tcp beside cuda_ipc carries only the wire-up, which cuda_ipc cannot."""

UCX_READ_BACK: Mapping[str, str] = MappingProxyType({"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"})
"""Makes UCX log, when a connection is made and never per transfer, which lanes it will use: the only way to tell
afterwards what carried the KV."""
