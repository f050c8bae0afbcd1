"""Keeps vLLM engines from starving each other where a few CPU cores are all there is.

vLLM calls :func:`register` in every process it starts. There are three repairs, each harmless to repeat
and skipped where it does not apply:

* NIXL's Python API always asks for a progress thread that polls without pause, one busy core an engine. The
  thread is given a pause of ``PDPERF_NIXL_POLL_US`` microseconds (500 by default), which also bounds how late
  it notices a finished transfer.
* The Mooncake connector asks torch which accelerator is current, an error where there is none. It is told 0.
* Mooncake's native module is linked against libraries of RDMA and NUMA, which a machine without either may not
  have. They are loaded from the environment; the dynamic linker then takes those for the ones it looks for.
"""

import contextlib
import ctypes
import os
import sys
from pathlib import Path
from typing import Any

POLL_VARIABLE = "PDPERF_NIXL_POLL_US"
DEFAULT_POLL_US = 500

LIBRARIES = Path(sys.prefix) / "lib" / "pdperf-libraries"
LOADING_ORDER = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1", "libnuma.so.1")
"""Filled by the build script with what the system lacks; a library comes after those it needs itself."""


def register() -> None:
    """Apply all repairs; the entry point in the group ``vllm.general_plugins``."""
    load_libraries(LIBRARIES)
    slow_down_nixl(int(os.environ.get(POLL_VARIABLE, DEFAULT_POLL_US)))
    name_an_accelerator()


def slow_down_nixl(poll_us: int) -> None:
    """Make every NIXL agent created from now on pause for at least ``poll_us`` between two looks."""
    if "nixl" not in sys.modules:
        # vLLM sets this itself, but only when it is the first to import NIXL.
        os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    try:
        import nixl._api as api
    except ImportError:
        return
    native: Any = api.nixlBind
    original: Any = native.nixlAgentConfig
    if hasattr(original, "pdperf_poll_us"):
        return

    class PausingAgentConfig(original):  # type: ignore[misc]
        pdperf_poll_us = poll_us

        @property
        def pthrDelay(self) -> int:  # noqa: N802 - the name of the native attribute
            return int(original.pthrDelay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, value: int) -> None:  # noqa: N802
            original.pthrDelay.__set__(self, max(value, poll_us))

    native.nixlAgentConfig = PausingAgentConfig


def load_libraries(folder: Path) -> None:
    """Load what ``folder`` holds of the libraries behind Mooncake; one that cannot be loaded is left to fail there."""
    for name in LOADING_ORDER:
        if (folder / name).is_file():
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)


def name_an_accelerator() -> None:
    """Answer 0 to "which accelerator is current?" on a machine that has none."""
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0
