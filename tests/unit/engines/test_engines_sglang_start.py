"""What a start-up of SGLang says of itself: how far it is, and why it failed; log lines are those of 0.5.17 on H200."""

from __future__ import annotations

import pytest

from pytest_pdperf.engines.sglang import ENGINE

NOW = "[2026-11-29 16:28:11] "


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        (NOW + "server_args=ServerArgs(model_path='M', load_format='dummy')", "reading configuration"),
        (NOW + "Init torch distributed begin.", "starting schedulers"),
        (NOW + "Load weight begin. avail mem=139.09 GB", "loading weights"),
        (NOW + "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 698889", "allocating KV cache"),
        (NOW + "Capture target prefill CUDA graph begin. backend=breakable", "capturing graphs"),
        (NOW + "Capture cuda graph begin. This can take up to several minutes.", "capturing graphs"),
        (
            "2026-11-29 16:28:09 NIXL INFO    _api.py:281 Initialized NIXL agent: 2fd4",
            "setting up KV transfer",
        ),
        (
            NOW + "INFO:     Uvicorn running on http://127.0.0.1:8200 (Press CTRL+C to quit)",
            "built-in warm-up",
        ),
        (NOW + "Start of pd disaggregation warmup ...", "built-in warm-up"),
        (NOW + "The server is fired up and ready to roll!", "serving"),
        (NOW + "Load weight end. elapsed=0.10 s, type=Qwen3ForCausalLM", None),
        (NOW + "Prefill batch, #new-seq: 1, #new-token: 4, #cached-token: 0", None),
        (NOW + '127.0.0.1:51686 - "PRI %2A HTTP/2.0" 404 Not Found', None),
    ],
)
def test_stages_of_a_start_up(line: str, stage: str | None) -> None:
    assert ENGINE.stage(line) == stage


TRACE = "Scheduler hit an exception: Traceback (most recent call last):"


FRAMES = ['  File "scheduler.py", line 4933, in run_scheduler_process', "    scheduler = Scheduler("]


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total of 79 GiB"


ECHOES = [
    NOW + "Received sigquit from a child process. It usually means the child failed.",
    "Traceback (most recent call last):",
    '  File "launch_server.py", line 60, in <module>',
    "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a "
    "common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.",
]


def test_the_cause_is_the_schedulers_traceback() -> None:
    lines = [f"[2026-11-29 16:28:11 TP1 EP0] {TRACE}", *FRAMES, OOM, "", *ECHOES]
    assert ENGINE.root_cause(lines) == OOM


def test_an_echo_before_the_cause_does_not_hide_it() -> None:
    end = "RuntimeError: Initialization failed. Please see the error messages above."
    cause = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    lines = ["Traceback (most recent call last):", *FRAMES, end, f"{NOW}{TRACE}", *FRAMES, cause]
    assert ENGINE.root_cause(lines) == cause


def test_a_scheduler_that_vanished_is_told_with_its_exit_code() -> None:
    assert ENGINE.root_cause(ECHOES) == "Rank 0 scheduler died during initialization (exit code: -9)"
    crashed = (
        NOW
        + "Subprocess scheduler_0 (pid=6145) crashed with exit code -11. Triggering SIGQUIT for cleanup..."
    )
    assert ENGINE.root_cause([crashed, NOW + "SIGQUIT received. signum=None"]) == "crashed with exit code -11"


@pytest.mark.parametrize(
    "line",
    [
        "launch_server.py: error: unrecognized arguments: --foo",
        "OSError: [Errno 28] No space left on device",
        "/usr/bin/python3: Error while finding module: No module named 'sglang.launch_server'",
        "NCCL error: unhandled system error",
    ],
)
def test_causes_without_a_traceback(line: str) -> None:
    assert ENGINE.root_cause([NOW + "Load weight begin.", line, *ECHOES]) == line


def test_an_ordinary_stop_has_no_cause() -> None:
    lines = [
        NOW + "Ignore import error when loading sglang.srt.models.inkling: No module named 'helion'",
        NOW + 'INFO:     127.0.0.1:51686 - "PRI %2A HTTP/2.0" 404 Not Found',
        NOW + "WARNING:  Invalid HTTP request received.",
        NOW + "SIGTERM received. signum=None frame=None. Draining requests and shutting down...",
        NOW
        + "Subprocess scheduler_0 (pid=6145) crashed with exit code -15. Triggering SIGQUIT for cleanup...",
        NOW + "SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
    ]
    assert ENGINE.root_cause(lines) is None
    assert ENGINE.root_cause([]) is None
