"""Runs vllm-router's own `main` without its debugging load balancer: a script for the router's interpreter.

The router is the Rust library behind `main`. Beside it, its launcher imports a load balancer for debugging at every
start, and with it fastapi, aiohttp and uvicorn: nine tenths of the time until the router listens. Here that one module
is imported when somebody asks for it (`--mini-lb`). Everything else is the launcher's, from its flags to its process
title. Standard library only, for any Python that the router runs on.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

DEBUG_BALANCER = "vllm_router.mini_lb"
LAUNCHER = "vllm_router.launch_router"


class Later(ModuleType):
    """Stands for a module until one of its names is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sys.modules.pop(self.__name__, None)
            return getattr(import_module(self.__name__), name)(*args, **kwargs)

        return call


def launcher() -> Any:
    """The launcher's module, without the debugging load balancer where it can do without."""
    sys.modules[DEBUG_BALANCER] = Later(DEBUG_BALANCER)
    try:
        return import_module(LAUNCHER)
    except Exception:  # a launcher that wants more of that module than to call its class
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_router"]:
            del sys.modules[name]
        return import_module(LAUNCHER)


if __name__ == "__main__":
    sys.path.pop(0)  # this script's folder
    sys.argv[0] = "vllm-router"
    sys.exit(launcher().main())
