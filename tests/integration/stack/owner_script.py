"""A stand-in for pytest: brings a stack up, says so, and waits to be killed. Arguments: folder, run id, what to do."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from pytest_pdperf.stack.beside import LaunchBeside
from pytest_pdperf.stack.launch import launch
from pytest_pdperf.stack.ports import PortRegistry
from tests.integration.stack.stack_fakes import plan, topology


def main() -> None:
    folder, run_id, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    env = {"FAKE_IGNORE_TERM": "1", "FAKE_DOUBLE_FORK": "1"}
    if mode == "starting":
        env["FAKE_NEVER_READY"] = "1"
    top = topology(env={"prefill": env, "decode": {"FAKE_IGNORE_TERM": "1"}})
    planned = plan(top, folder, PortRegistry(folder / "ports"), run_id=run_id)

    def progress(text: str) -> None:
        print(text, flush=True)

    if mode == "thread":
        # The thread that started the engines ends; they must live on.
        beside = LaunchBeside(planned, deadline_s=60)
        beside.start()
        stack = beside.result()
        time.sleep(0.5)
        stack.check()
    else:
        stack = launch(planned, deadline_s=60, progress=progress)
    if mode == "forked" and os.fork() == 0:
        time.sleep(600)  # holds copies of all pipes, as a multiprocessing worker of a test would
        os._exit(0)
    print("up", flush=True)
    try:
        time.sleep(600)
    finally:
        print("closing", flush=True)
        stack.close(600 if mode == "patient" else 1)
        print("closed", flush=True)


if __name__ == "__main__":
    main()
