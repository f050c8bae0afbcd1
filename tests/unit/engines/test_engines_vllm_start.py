"""What a start-up of vLLM says of itself: how far it is, and why it failed."""

from __future__ import annotations

import pytest

from pytest_pdperf.engines.vllm import ENGINE

API, CORE = "(APIServer pid=878) INFO 11-29 16:16:22 ", "(EngineCore pid=1468) INFO 11-29 16:16:45 "


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        (API + "[api_utils.py:273] non-default args: {'model_tag': 'M'}", "reading configuration"),
        (API + "[model.py:623] Resolved architecture: Qwen3ForCausalLM", "reading configuration"),
        (CORE + "[core.py:116] Initializing a V1 LLM engine (v0.26.0)", "starting engine core"),
        (CORE + "[model_runner.py:284] Loading model from scratch...", "loading weights"),
        (CORE + "[cpu_model_runner.py:68] Starting to load model M...", "loading weights"),
        (CORE + "[backends.py:1155] Dynamo bytecode transform time: 8.62 s", "torch.compile"),
        (CORE + "[monitor.py:81] Initial profiling/warmup run took 0.55 s", "profiling memory"),
        (CORE + "[kv_cache_utils.py:2177] GPU KV cache size: 743,120 tokens", "profiling memory"),
        (CORE + "[base_worker.py:249] Initializing NIXL wrapper", "setting up KV transfer"),
        (CORE + "[model_runner.py:747] Graph capturing finished in 2 secs", "capturing graphs"),
        (API + "[api_server.py:677] Starting vLLM server on http://127.0.0.1:8200", "serving"),
        (
            API
            + "[loggers.py:310] Engine 000: Avg prompt throughput: 0.3 tokens/s, GPU KV cache usage: 0.0%",
            None,
        ),
        ('(APIServer pid=878) INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK', None),
    ],
)
def test_stages_of_a_start_up(line: str, stage: str | None) -> None:
    assert ENGINE.stage(line) == stage


def core_error(text: str, pid: int = 204, source: str = "EngineCore_DP0") -> str:
    return f"({source} pid={pid}) ERROR 02-03 04:05:10 [core.py:708] {text}"


TRACE = "Traceback (most recent call last):"


FRAME = '  File "core.py", line 700, in run_engine_core'


WRAPPERS = [
    f"(APIServer pid=205) {TRACE}",
    '(APIServer pid=205)   File "vllm", line 8, in <module>',
    "(APIServer pid=205) RuntimeError: Engine core initialization failed. See root cause above. Failed: {}",
]


KV_TOO_SMALL = (
    "ValueError: To serve at least one request with max seq len (40960), 5.6 GiB KV cache is needed"
)


def test_the_cause_is_below_the_wrappers() -> None:
    lines = [
        core_error("EngineCore failed to start."),
        core_error(TRACE),
        core_error(FRAME),
        core_error(KV_TOO_SMALL),
        "(EngineCore_DP0 pid=204) Process EngineCore_DP0:",
        f"(EngineCore_DP0 pid=204) {TRACE}",
        "(EngineCore_DP0 pid=204) RuntimeError: something later",
        *WRAPPERS,
    ]
    assert ENGINE.root_cause(lines) == KV_TOO_SMALL


def test_the_cause_is_in_the_worker_when_there_are_workers() -> None:
    oom = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total of 79 GiB"
    )
    lines = [
        core_error(TRACE, 300, "Worker_TP0"),
        core_error(TRACE),
        core_error(FRAME, 300, "Worker_TP0"),
        core_error(FRAME),
        core_error(
            "Exception: WorkerProc initialization failed due to an exception in a background process. "
            "See stack trace for root cause."
        ),
        core_error(oom, 300, "Worker_TP0"),
        *WRAPPERS,
    ]
    assert ENGINE.root_cause(lines) == oom


@pytest.mark.parametrize(
    "link",
    [
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ],
)
def test_a_chain_is_told_by_its_last_exception(link: str) -> None:
    lines = [
        f"(APIServer pid=205) {TRACE}",
        "(APIServer pid=205) KeyError: 'qwen4'",
        "(APIServer pid=205) ",
        f"(APIServer pid=205) {link}",
        "(APIServer pid=205) ",
        f"(APIServer pid=205) {TRACE}",
        "(APIServer pid=205) ValueError: model type qwen4 is not known",
        f"(APIServer pid=205) {TRACE}",
        "(APIServer pid=205) RuntimeError: something later",
    ]
    assert ENGINE.root_cause(lines) == "ValueError: model type qwen4 is not known"


def test_a_validation_error_is_told_with_its_reason() -> None:
    lines = [
        f"(APIServer pid=205) {TRACE}",
        "(APIServer pid=205) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "(APIServer pid=205)   Value error, User-specified max_model_len (999999) is too large [type=value_error]",
        "(APIServer pid=205)     For further information visit https://errors.pydantic.dev",
    ]
    cause = ENGINE.root_cause(lines)
    assert cause is not None
    assert cause.endswith(
        "for ModelConfig: Value error, User-specified max_model_len (999999) is too large [type=value_error]"
    )


def test_an_optional_import_that_failed_is_not_the_cause() -> None:
    warning = "(APIServer pid=205) WARNING 02-03 04:05:08 [utils.py:1] "
    lines = [
        warning + TRACE,
        warning + '  File "optional.py", line 1',
        warning + "ModuleNotFoundError: No module named 'flash_attn'",
        core_error(TRACE),
        core_error("OSError: [Errno 28] No space left on device"),
        *WRAPPERS,
    ]
    assert ENGINE.root_cause(lines) == "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            "vllm serve: error: unrecognized arguments: --foo",
            "vllm serve: error: unrecognized arguments: --foo",
        ),
        ("OSError: [Errno 98] Address already in use", "OSError: [Errno 98] Address already in use"),
        (core_error("NCCL error: unhandled system error"), "NCCL error: unhandled system error"),
        ("Fatal Python error: Segmentation fault", "Fatal Python error: Segmentation fault"),
    ],
)
def test_causes_without_a_traceback(line: str, cause: str) -> None:
    assert ENGINE.root_cause(["INFO: hello", line, "bye"]) == cause


def test_an_engine_core_that_vanished_says_more_than_who_noticed() -> None:
    """SIGKILL of the core, vLLM 0.32: no traceback of its own, and the API server ends with exit code 0."""
    api = "(APIServer pid=31434) ERROR 11-29 17:57:31 [async_llm.py:906] "
    dead = (
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)"
    )
    assert (
        ENGINE.root_cause([api + "AsyncLLM output_handler failed.", api + TRACE, api + FRAME, api + dead])
        == dead
    )


def test_only_wrappers_give_the_wrapper() -> None:
    cause = ENGINE.root_cause(WRAPPERS)
    assert cause is not None
    assert cause.startswith("RuntimeError: Engine core initialization failed")


@pytest.mark.parametrize("lines", [[], ["INFO 11-29 16:16:22 [a.py:1] all is well", "bye"]])
def test_nothing_stands_out(lines: list[str]) -> None:
    assert ENGINE.root_cause(lines) is None
