"""What makes a node unfit to measure on: small checks of one thing each, none of which changes anything."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pytest_pdperf.engines.base import Programs
from pytest_pdperf.gpus.inventory import Inventory, describe
from pytest_pdperf.stack.slurm.leftovers import LeftJob

GIB = 1 << 30
SHM_WANTED = 8 * GIB
"""Tensor-parallel workers of one node talk through /dev/shm; a container's usual 64 MiB are too little."""
FILES_WANTED = 8192
DISK_WANTED = 2 * GIB
SLOW_CLOCKS = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies"})


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's answer."""

    what: str
    level: Level
    text: str
    way_out: str = ""


def check_gpus(inventory: Inventory) -> Iterator[Finding]:
    """Driver, devices, who is on them, memory errors and throttling."""
    if not inventory.gpus:
        reason = inventory.problem or "the driver lists none"
        yield Finding("GPUs", Level.INFO, f"none: {reason}", "--engine sim and --gpus cpu work without")
        return
    yield Finding(
        "GPUs",
        Level.OK,
        f"{describe(inventory.gpus)}, driver {inventory.driver}, CUDA {inventory.cuda or 'unknown'}",
    )
    for gpu in inventory.gpus:
        name = f"GPU {gpu.index}"
        if gpu.processes:
            who = ", ".join(f"pid {p.pid} ({p.command or 'unknown'})" for p in gpu.processes)
            yield Finding(name, Level.WARN, f"in use by {who}", "wait, or choose others with --gpus")
        if gpu.ecc_uncorrected:
            yield Finding(
                name,
                Level.FAIL,
                f"{gpu.ecc_uncorrected} uncorrected memory errors since its start",
                "reset it",
            )
        if gpu.throttle_reasons:
            yield Finding(
                name, Level.WARN, f"throttled: {', '.join(gpu.throttle_reasons)}", "check cooling and power"
            )
        if gpu.mig_enabled and not gpu.mig_devices:
            yield Finding(name, Level.WARN, "MIG is on and has no slices", "create slices, or turn MIG off")


def check_shm(path: Path = Path("/dev/shm"), total: Callable[[Path], int] | None = None) -> Finding:
    """Size of shared memory."""
    try:
        size = total(path) if total else shutil.disk_usage(path).total
    except OSError as problem:
        return Finding("shared memory", Level.WARN, f"{path}: {problem.strerror}")
    text = f"{path} holds {size / GIB:.1f} GiB"
    if size < SHM_WANTED:
        return Finding(
            "shared memory", Level.WARN, text, "start the container with --ipc=host or --shm-size=16g"
        )
    return Finding("shared memory", Level.OK, text)


def check_limits(limit: Callable[[int], tuple[int, int]] = resource.getrlimit) -> Iterator[Finding]:
    """Open files (a connection a client) and locked memory (RDMA registers its buffers)."""
    soft, hard = limit(resource.RLIMIT_NOFILE)
    files = Finding("open files", Level.OK, f"limit {_limit(soft)}, can be raised to {_limit(hard)}")
    if soft != resource.RLIM_INFINITY and soft < FILES_WANTED:
        files = Finding("open files", Level.WARN, files.text, f"ulimit -n {FILES_WANTED}")
    yield files
    soft, _ = limit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("locked memory", Level.OK, "unlimited")
    else:
        yield Finding("locked memory", Level.INFO, f"limit {_limit(soft)}", "RDMA needs: ulimit -l unlimited")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def check_ports(window: range, bindable: Callable[[int], bool], sample: int = 64) -> Finding:
    """Room in the port range that stacks take their ports from."""
    probe = window[:: max(1, len(window) // sample)] if len(window) else window
    free = sum(bindable(port) for port in probe)
    text = f"{window.start}-{window.stop - 1}: {free} of {len(probe)} tried are free"
    if len(window) < 256 or free < len(probe) // 2:
        return Finding(
            "ports", Level.WARN, text, "narrow net.ipv4.ip_local_port_range, or end what holds them"
        )
    return Finding("ports", Level.OK, text)


def check_receive_stamps() -> Finding:
    """Whether the kernel stamps received bytes: without it the client's times hold Python's own delays."""
    from pytest_pdperf.load.stamps import Stamping

    try:
        with Stamping() as stamping:
            works = stamping.works
    except OSError as problem:
        return Finding("kernel stamps", Level.WARN, f"cannot be tried: {problem}")
    if works:
        return Finding("kernel stamps", Level.OK, "SO_TIMESTAMPNS works on TCP")
    return Finding(
        "kernel stamps", Level.WARN, "SO_TIMESTAMPNS gives nothing", "times will be user-space and say so"
    )


def check_clock(sys_root: Path = Path("/sys")) -> Finding | None:
    """A slow clock source makes every stamp expensive. None where the kernel does not tell."""
    source = _read(sys_root / "devices/system/clocksource/clocksource0/current_clocksource")
    if source is None:
        return None
    if source in SLOW_CLOCKS:
        return Finding("clock source", Level.WARN, source, "boot with clocksource=tsc")
    return Finding("clock source", Level.OK, source)


def check_governor(sys_root: Path = Path("/sys")) -> Finding | None:
    """CPUs that change their frequency widen the noise of small latencies. None where it is not known."""
    found = {
        text
        for path in sys_root.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
        if (text := _read(path))
    }
    if not found:
        return None
    text = ", ".join(sorted(found))
    if found == {"performance"}:
        return Finding("CPU governor", Level.OK, text)
    return Finding("CPU governor", Level.WARN, text, "cpupower frequency-set -g performance")


def check_load(average: float, cpus: int) -> Finding:
    """Other work on the CPUs that the client needs."""
    text = f"load {average:.1f} on {cpus} CPUs"
    if average > 0.5 * cpus:
        return Finding("other work", Level.WARN, text, "measure when the node is quiet")
    return Finding("other work", Level.OK, text)


def check_quota(root: Path = Path("/sys/fs/cgroup"), cpus: int | None = None) -> Finding | None:
    """A CPU quota below the visible CPUs throttles in bursts. None without a quota."""
    text = _read(root / "cpu.max")
    parts = (text or "max").split()
    if parts[0] == "max" or len(parts) < 2 or not all(part.isdigit() for part in parts):
        return None
    share, seen = int(parts[0]) / int(parts[1]), cpus or len(os.sched_getaffinity(0))
    if share >= seen:
        return None
    return Finding(
        "CPU quota", Level.WARN, f"{share:g} of {seen} CPUs", "give the container whole CPUs (cpuset)"
    )


def check_disk(path: Path) -> Finding:
    """Room for records and logs."""
    place = next((p for p in (path, *path.resolve().parents) if p.is_dir()), Path("/"))
    free = shutil.disk_usage(place).free
    level = Level.WARN if free < DISK_WANTED else Level.OK
    return Finding(
        "disk", level, f"{free / GIB:.1f} GiB free for {path}", "make room" if level is Level.WARN else ""
    )


def check_rdma(sys_root: Path = Path("/sys"), proc: Path = Path("/proc")) -> Finding:
    """RDMA ports that KV transfers could use, and the module that lets them reach GPU memory."""
    ports = sorted(sys_root.glob("class/infiniband/*/ports/*/state"))
    active = [path for path in ports if "ACTIVE" in (_read(path) or "")]
    if not ports:
        return Finding("RDMA", Level.INFO, "no device; KV moves over TCP, or NVLink inside the node")
    modules = _read(proc / "modules") or ""
    peer = "nvidia_peermem loaded" if "nvidia_peermem" in modules else "nvidia_peermem not loaded"
    level = Level.OK if active else Level.WARN
    return Finding("RDMA", level, f"{len(active)} of {len(ports)} ports active, {peer}")


def check_programs(programs: Programs) -> Iterator[Finding]:
    """Engines and routers that can be started, with their versions."""
    from pytest_pdperf.engines.registry import ENGINES, get_engine
    from pytest_pdperf.routers.registry import ROUTERS, get_router

    yield Finding("python", Level.OK, platform.python_version())
    for kind, names, get in (("engine", ENGINES, get_engine), ("router", ROUTERS, get_router)):
        for name in sorted(names):
            if name.startswith("sim"):
                continue
            try:
                version = get(name).version(programs)
            except ImportError:
                continue  # registered, not part of this version
            if version == "unknown":
                yield Finding(
                    f"{kind} {name}", Level.INFO, "not found", "install it, or give --engine-env DIR"
                )
            else:
                yield Finding(f"{kind} {name}", Level.OK, version)


def check_leftovers(lines: Sequence[str]) -> Finding:
    """Processes that dead runs left behind."""
    if not lines:
        return Finding("leftovers", Level.OK, "no process of a dead run")
    return Finding("leftovers", Level.FAIL, "; ".join(lines), "pdperf doctor --clean")


def check_left_jobs(jobs: Sequence[LeftJob], *, cancelled: bool) -> Finding:
    """Slurm jobs whose run is dead hold GPUs until their time limit."""
    dead = [str(job) for job in jobs if job.dead]
    if dead and not cancelled:
        return Finding("Slurm jobs", Level.FAIL, "; ".join(dead), "pdperf doctor --clean")
    others = [str(job) for job in jobs if not job.dead]
    ended = [f"{len(dead)} of dead runs were cancelled"] if dead else []
    text = "; ".join([*ended, *others]) or "none of a dead run"
    return Finding("Slurm jobs", Level.INFO if others else Level.OK, text)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
