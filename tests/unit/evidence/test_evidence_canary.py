"""The canary tells a slow machine from a slow engine, and what it cannot tell it does not claim."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pytest_pdperf.engines.base import Programs
from pytest_pdperf.evidence import canary
from pytest_pdperf.evidence.canary import (
    AFTER,
    BEFORE,
    GPU_SCRIPT,
    LIMIT,
    Canaries,
    Canary,
    canaries_for,
    cpu_canary,
    differences,
    engine_python,
    gpu_canary,
    run_script,
)
from pytest_pdperf.gpus.grammar import GpuRequest


def env(before: float | None = None, after: float | None = None, **more: str) -> dict[str, str]:
    """A launch's environment with the time of its GEMM."""
    found = dict(more)
    if before is not None:
        found[BEFORE] = Canary({"gemm": before}, {"gemm": 0.004}).to_text()
    if after is not None:
        found[AFTER] = Canary({"gemm": after}).to_text()
    return found


class Ticks:
    """A clock whose readings are given as durations of the timed work, one after the other."""

    def __init__(self, durations: Sequence[float]) -> None:
        self._readings = [reading for d in durations for reading in (0.0, d)]

    def __call__(self) -> float:
        return self._readings.pop(0)


def test_the_fastest_repeat_counts_and_the_second_says_how_sure_that_is() -> None:
    found = cpu_canary(3, Ticks([0.012, 0.010, 0.011, 0.005, 0.004, 0.006]))
    assert found.ms == pytest.approx({"integer_loop": 10.0, "memory_copy": 4.0})
    assert found.spread == pytest.approx({"integer_loop": 0.1, "memory_copy": 0.25})
    with pytest.raises(ValueError, match="repeat"):
        cpu_canary(1)
    assert cpu_canary(2, lambda: 0.0).note.startswith("unknown")


def test_a_real_cpu_canary_has_two_positive_times() -> None:
    canary = cpu_canary(3)
    assert set(canary.ms) == set(canary.spread) == {"integer_loop", "memory_copy"}
    assert all(value > 0 for value in canary.ms.values())
    assert Canary.from_text(canary.to_text()).ms == pytest.approx(canary.ms, rel=1e-3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none: simulated",
        "[]",
        "{}",
        '{"ms": 3}',
        '{"ms": {"gemm": "x"}}',
        '{"ms": {"gemm": 0}}',
        '{"ms": {"a": NaN}}',
    ],
)
def test_what_holds_no_numbers_is_a_note(text: str) -> None:
    assert Canary.from_text(text) == Canary(note=text)
    assert Canary(note=text).to_text() == text


@pytest.mark.parametrize(
    ("factor", "off"), [(1.0, False), (1.029, False), (1.031, True), (0.971, False), (0.969, True)]
)
def test_off_by_more_than_the_limit_either_way_is_a_reason(factor: float, off: bool) -> None:
    stored = [env(10.0), env(10.0), env(99.0)]
    found = differences(env(10.0 * factor), stored)
    assert bool(found) is off
    if off:
        (line,) = found
        assert (
            "canary gemm before the launch" in line
            and "baseline 10 ms" in line
            and f"limit {LIMIT:.0%}" in line
        )
        assert "repeats to 0.4%" in line


def test_before_is_held_against_before_and_after_against_after() -> None:
    stored = [env(10.0, 11.0)]
    assert differences(env(10.0, 11.0), stored) == ()
    (line,) = differences(env(10.0, 11.5), stored)
    assert "after the launch" in line and "+4.5%" in line
    assert len(differences(env(11.0, 10.0), stored)) == 2


@pytest.mark.parametrize(
    ("now", "stored"),
    [
        (env(10.0), []),
        (env(10.0), [{}]),
        ({}, [env(10.0)]),
        ({BEFORE: "unknown: no torch"}, [env(10.0)]),
        ({BEFORE: Canary({"integer_loop": 99.0}).to_text()}, [env(10.0)]),
    ],
)
def test_what_one_side_does_not_know_is_not_compared(
    now: Mapping[str, str], stored: list[Mapping[str, str]]
) -> None:
    assert differences(now, stored) == ()


def test_a_throttled_gpu_and_low_clocks_are_reasons() -> None:
    cool = [env(throttled_share="0.00", sm_mhz="1980")]
    assert differences(env(throttled_share="0.04", sm_mhz="1950"), cool) == ()
    (line,) = differences(env(throttled_share="0.60", sm_mhz="1980"), cool)
    assert "throttled" in line and "0.60" in line
    (line,) = differences(env(throttled_share="0.00", sm_mhz="1600"), cool)
    assert "clocks off: 1600 MHz, baseline 1980 MHz" in line
    capped = [env(throttled_share="0.60", sm_mhz="1600")]
    assert differences(env(throttled_share="0.60", sm_mhz="1600"), capped) == (), "its normal state"
    assert differences(env(throttled_share="nan"), cool) == ()
    assert differences(env(throttled_share="0.60", sm_mhz="1600"), [env()]) == (), (
        "the baseline does not know"
    )
    (line,) = differences(env(throttled_share="0.60", sm_mhz="1600"), [env(sm_mhz="1980")])
    assert "clocks off" in line


def fake_run(
    answer: str | Exception, seen: list[tuple[Sequence[str], Mapping[str, str]]] | None = None
) -> object:
    def run(argv: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> str:
        assert timeout_s > 0
        if seen is not None:
            seen.append((argv, environ))
        if isinstance(answer, Exception):
            raise answer
        return answer

    return run


def test_gpus_are_timed_by_the_engines_python_on_the_leased_devices_only() -> None:
    seen: list[tuple[Sequence[str], Mapping[str, str]]] = []
    run = fake_run('a warning\n{"ms": {"gemm": 1.4, "peer_copy": 0.7}, "spread": {"gemm": 0.002}}\n', seen)
    canary = gpu_canary(Path("/e/bin/python"), ["2", "GPU-x"], {"A": "b", "CUDA_VISIBLE_DEVICES": "7"}, run)  # type: ignore[arg-type]
    assert canary == Canary({"gemm": 1.4, "peer_copy": 0.7}, {"gemm": 0.002})
    assert seen == [(("/e/bin/python", str(GPU_SCRIPT)), {"A": "b", "CUDA_VISIBLE_DEVICES": "2,GPU-x"})]


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        (
            subprocess.CalledProcessError(
                1, "x", stderr="Traceback\nModuleNotFoundError: No module named 'torch'\n"
            ),
            "torch",
        ),
        (subprocess.CalledProcessError(3, "x"), "exit status 3"),
        (subprocess.TimeoutExpired("x", 5), "timed out"),
        (OSError("no such file"), "no such file"),
        ("", "no numbers"),
        ("not json", "no numbers"),
    ],
)
def test_a_canary_that_fails_says_so_and_stops_nothing(answer: str | Exception, note: str) -> None:
    canary = gpu_canary(Path("python"), ["0"], {}, fake_run(answer))  # type: ignore[arg-type]
    assert not canary.ms and canary.note.startswith("unknown") and note in canary.note
    assert "unknown" in gpu_canary(None, ["0"], {}).note


def test_the_gpu_script_runs_in_any_python_and_names_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "class cuda:\n    @staticmethod\n    def device_count():\n        return 0\n"
    )
    blind = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    assert gpu_canary(Path(sys.executable), ["0"], blind).note == "unknown: torch sees no GPU"
    assert run_script((sys.executable, "-c", "print(7)"), {}, 30) == "7\n"


def test_the_engines_python_comes_from_its_first_line_else_from_the_search_path(tmp_path: Path) -> None:
    (tmp_path / "vllm").write_text("#!/opt/engine/bin/python3.12\n")
    (tmp_path / "sglang").write_text("#!/bin/sh\nexec python3 -m sglang\n")
    programs = Programs((tmp_path,))
    assert engine_python(programs, "vllm") == Path("/opt/engine/bin/python3.12")
    assert engine_python(programs, "sglang") is None
    (tmp_path / "python3").touch()
    assert engine_python(programs, "sglang") == engine_python(programs, "absent") == tmp_path / "python3"


def test_each_launch_keeps_its_own_and_the_latest_bring_up_counts() -> None:
    times = iter([1.0, 2.0, 3.0, 4.0])
    said: list[str] = []
    canaries = Canaries(lambda: Canary({"gemm": next(times)}), lambda text, detail=False: said.append(text))
    canaries.before("one")
    canaries.before("one")
    canaries.after("one")
    canaries.before("two")
    canaries.stop()
    canaries.after("two")
    assert canaries.of("one") == env(2.0) | {
        BEFORE: Canary({"gemm": 2.0}).to_text(),
        AFTER: Canary({"gemm": 3.0}).to_text(),
    }
    assert canaries.of("two") == {BEFORE: Canary({"gemm": 4.0}).to_text()}
    assert canaries.of("three") == {}
    assert said[0] == "one: canary before: gemm 1 ms" and len(said) == 4


def test_the_simulator_has_none_and_says_so() -> None:
    def never() -> Canary:
        raise AssertionError("nothing may be timed")

    for gpus, off, note in (
        (None, "", "simulated"),
        (GpuRequest(("0",)), "--canary off", "off: --canary off"),
        (GpuRequest(cpu=True), "--overlap-start", "off: --overlap-start"),
    ):
        canaries = canaries_for(gpus, off=off, take=never, say=print)
        canaries.before("one")
        assert note in canaries.of("one")[BEFORE]
    real = canaries_for(
        GpuRequest((0,)), off="", take=lambda: Canary({"gemm": 5.0}), say=lambda *_, **__: None
    )
    real.after("one")
    assert Canary.from_text(real.of("one")[AFTER]).ms == {"gemm": 5.0}


def test_engines_on_a_cpu_get_the_cpus_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "cpu_canary", lambda: Canary({"integer_loop": 7.0}))
    canaries = canaries_for(
        GpuRequest(cpu=True), off="", take=lambda: Canary({"gemm": 1.0}), say=lambda *_, **__: None
    )
    canaries.before("one")
    assert Canary.from_text(canaries.of("one")[BEFORE]).ms == {"integer_loop": 7.0}
