"""Each check of the doctor tells a good node from a bad one."""

from pathlib import Path

import pytest

from pytest_pdperf.commands import checks
from pytest_pdperf.commands.checks import GIB, Level
from pytest_pdperf.engines.base import Programs
from pytest_pdperf.gpus.inventory import Gpu, GpuProcess, Inventory, load_recorded

DATA = Path(__file__).parents[2] / "data" / "inventories"


def write(root: Path, place: str, text: str) -> None:
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_no_gpu_is_information_with_a_way_on() -> None:
    (finding,) = checks.check_gpus(Inventory(problem="no driver"))
    assert finding.level is Level.INFO and "no driver" in finding.text and "--engine sim" in finding.way_out


def test_a_quiet_node_is_one_line() -> None:
    (finding,) = checks.check_gpus(load_recorded(DATA / "hgx-h100-8x.json"))
    assert finding.level is Level.OK and "8 x NVIDIA H100" in finding.text


def test_a_busy_throttled_or_broken_gpu_is_named() -> None:
    gpu = Gpu(
        index=3,
        uuid="GPU-3",
        name="H100",
        memory_mib=80000,
        processes=(GpuProcess(pid=77, command="train.py"),),
        ecc_uncorrected=2,
        throttle_reasons=("hardware thermal slowdown",),
    )
    found = {f.text: f.level for f in checks.check_gpus(Inventory(gpus=(gpu,))) if f.what == "GPU 3"}
    assert found == {
        "in use by pid 77 (train.py)": Level.WARN,
        "2 uncorrected memory errors since its start": Level.FAIL,
        "throttled: hardware thermal slowdown": Level.WARN,
    }


@pytest.mark.parametrize(("size", "level"), [(64 * 1024 * 1024, Level.WARN), (16 * GIB, Level.OK)])
def test_shared_memory(size: int, level: Level) -> None:
    assert checks.check_shm(total=lambda _: size).level is level


@pytest.mark.parametrize(
    ("files", "memory", "levels"),
    [((1024, 4096), (65536, 65536), [Level.WARN, Level.INFO]), ((65536, -1), (-1, -1), [Level.OK, Level.OK])],
)
def test_limits(files: tuple[int, int], memory: tuple[int, int], levels: list[Level]) -> None:
    import resource

    limits = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_MEMLOCK: memory}
    assert [f.level for f in checks.check_limits(lambda which: limits[which])] == levels


def test_ports() -> None:
    window = range(24576, 32768)
    assert checks.check_ports(window, lambda _: True).level is Level.OK
    assert checks.check_ports(window, lambda port: port > 30000).level is Level.WARN
    assert checks.check_ports(range(100, 150), lambda _: True).level is Level.WARN


@pytest.mark.parametrize(("source", "level"), [("tsc", Level.OK), ("hpet", Level.WARN)])
def test_clock_source(tmp_path: Path, source: str, level: Level) -> None:
    assert checks.check_clock(tmp_path) is None
    write(tmp_path, "devices/system/clocksource/clocksource0/current_clocksource", source + "\n")
    finding = checks.check_clock(tmp_path)
    assert finding is not None and finding.level is level


def test_one_slow_governor_is_enough(tmp_path: Path) -> None:
    assert checks.check_governor(tmp_path) is None
    write(tmp_path, "devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n")
    finding = checks.check_governor(tmp_path)
    assert finding is not None and finding.level is Level.OK
    write(tmp_path, "devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave\n")
    finding = checks.check_governor(tmp_path)
    assert finding is not None and finding.level is Level.WARN and "powersave" in finding.text


def test_load() -> None:
    assert checks.check_load(0.3, 16).level is Level.OK
    assert checks.check_load(9.0, 16).level is Level.WARN


@pytest.mark.parametrize(
    ("text", "warned"),
    [("max 100000", False), ("150000 100000", True), ("800000 100000", False), ("junk", False)],
)
def test_a_cpu_quota_below_the_visible_cpus_is_told(tmp_path: Path, text: str, warned: bool) -> None:
    write(tmp_path, "cpu.max", text)
    assert (checks.check_quota(tmp_path, cpus=8) is not None) is warned


def test_rdma(tmp_path: Path) -> None:
    assert checks.check_rdma(tmp_path, tmp_path).level is Level.INFO
    write(tmp_path, "class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
    assert checks.check_rdma(tmp_path, tmp_path).level is Level.WARN
    write(tmp_path, "class/infiniband/mlx5_1/ports/1/state", "4: ACTIVE\n")
    write(tmp_path, "modules", "nvidia_peermem 16384 0\n")
    finding = checks.check_rdma(tmp_path, tmp_path)
    assert finding.level is Level.OK and finding.text == "1 of 2 ports active, nvidia_peermem loaded"


def test_programs_that_are_not_there_are_no_failure(tmp_path: Path) -> None:
    found = {f.what: f for f in checks.check_programs(Programs((tmp_path,)))}
    assert found["engine vllm"].level is Level.INFO and "--engine-env" in found["engine vllm"].way_out
    assert not any(what.startswith("engine sim") for what in found)


def test_leftovers_fail_and_name_the_remedy() -> None:
    assert checks.check_leftovers([]).level is Level.OK
    finding = checks.check_leftovers(["pid 7: decode-0 of run r"])
    assert finding.level is Level.FAIL and "--clean" in finding.way_out and "pid 7" in finding.text


def test_disk_is_measured_where_the_folder_will_be(tmp_path: Path) -> None:
    assert "GiB free" in checks.check_disk(tmp_path / "not" / "yet").text
