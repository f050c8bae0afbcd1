"""Everything around one cell: what makes it INVALID, what is only said, and what is not known."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from pytest_pdperf.evidence.cell_evidence import (
    CellEvidence,
    Seen,
    Watched,
    adds_up,
    judge_cell,
    merged_ms,
)
from pytest_pdperf.evidence.cell_window import CellWindow, Instruments, StackWatch, TransportLog
from pytest_pdperf.evidence.drain import Drain
from pytest_pdperf.evidence.exposition import Snapshot, Unknown, parse_exposition
from pytest_pdperf.evidence.gpu_trace import GpuSampler, Look
from pytest_pdperf.evidence.outside import outside_ms
from pytest_pdperf.evidence.record import Status
from pytest_pdperf.evidence.transport import LinkBytes, LogTransport
from pytest_pdperf.gpus.nvml import GpuSample
from pytest_pdperf.measure.records import CellRecords, RequestRecord
from pytest_pdperf.measure.records import Status as Ended
from pytest_pdperf.spec.topology import Kind, Role

DATA = Path(__file__).parents[2] / "data" / "evidence"
ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
URLS = {name: f"http://127.0.0.1:1/{name}" for name in ROLES}
START_S = 1_700_000_000
TCP = LogTransport("UCX", frozenset({"tcp"}), frozenset(), ("UCX INFO inter-node cfg#1 tcp/eth0",))
Pages = dict[str, Snapshot | Unknown]


def page(name: str) -> Snapshot:
    found = parse_exposition((DATA / name).read_text())
    assert isinstance(found, Snapshot), found
    return found


BEFORE: Pages = dict.fromkeys(ROLES, page("vllm_idle.prom"))
AFTER: Pages = {"prefill-0": page("vllm_prefill.prom"), "decode-0": page("vllm_decode.prom")}
WATCHED = Watched(Kind.PD, ROLES, URLS, router_ms=0.5)


def records(ttft_ms: float = 241.0, *, hidden: int = 0, stamps: str = "kernel") -> CellRecords:
    """The ten requests that the recorded pages count, one a second."""
    made = []
    for i in range(10):
        sent = (START_S + i) * 10**9
        first = sent + round(ttft_ms * 1e6)
        made.append(
            RequestRecord(
                stream="main",
                index=i,
                warmup=False,
                status=Ended.OK,
                planned_input_tokens=4096,
                planned_output_tokens=128,
                sent_ns=sent,
                end_ns=sent + 10**9,
                event_ns=(first, sent + 10**9),
                event_lag_ns=(10, 10),
                event_tokens=(1, 127),
                prompt_tokens=4096,
                completion_tokens=128,
                output_tokens=128,
                not_streamed=i < hidden,
            )
        )
    return CellRecords(tuple(made), stamps, made[0].sent_ns, made[-1].end_ns or 0)


SEEN = Seen(
    before=BEFORE,
    drain=Drain("drained", 0.2, AFTER),
    lines={name: [] for name in ROLES},
    transport_log=TCP,
    links_before=LinkBytes(),
    links_after=LinkBytes(),
)


def test_a_healthy_cell_has_nothing_to_say_and_its_stages_add_up() -> None:
    found = judge_cell(WATCHED, SEEN, records())
    assert found.evidence.status is Status.PROVEN
    assert (found.problems, found.warnings) == ((), ())
    assert found.split is not None
    assert found.split.stages["router"] == 0.5
    assert found.split.stages["client"] == 0.0
    assert found.split.closure_error_ms == pytest.approx(0.5)
    assert found.details()["ttft"]["adds_up"] is True
    assert found.throttle is None
    assert {row.role for row in found.loads} == {Role.PREFILL, Role.DECODE}
    json.dumps(found.details(), allow_nan=False)


def test_what_the_logs_of_a_cell_say_is_a_warning_and_a_rate_is_kept() -> None:
    decode = "Decode batch. #running-req: 3, #transfer-req: 2, gen throughput (token/s): "
    rows = [decode + rate for rate in ("0.00", "0.00", "0.00", "90.0", "100.0")]
    glog = "E0203 04:05:07.000004 302 tcp_transport.cpp:170] Session::readBody failed. Error: End of file"
    found = judge_cell(WATCHED, replace(SEEN, lines={"prefill-0": [glog, glog], "decode-0": rows}), records())
    assert found.problems == ()
    stuck, failing = sorted(found.warnings)
    assert stuck.startswith("decode-0: three progress lines in a row") and "stood still" in stuck
    assert failing == (
        "prefill-0: Mooncake's transfer engine logged 2 errors, first: tcp_transport.cpp:170: Session::readBody "
        "failed. Error: End of file"
    )
    assert found.details()["logged"]["generation_tps"] == {"decode-0": pytest.approx(45.0)}
    quiet = judge_cell(WATCHED, replace(SEEN, lines={"prefill-0": rows, "decode-0": None}), records())
    assert quiet.warnings == () and quiet.logged.generation_tps == {}


@pytest.mark.parametrize(("measured", "fits"), [(241.0, True), (266.0, True), (268.0, False), (214.0, False)])
def test_stages_that_miss_the_measured_ttft_by_more_than_a_tenth_are_pointed_out(
    measured: float, fits: bool
) -> None:
    found = judge_cell(WATCHED, SEEN, records(measured))
    assert found.split is not None
    assert adds_up(found.split) is fits
    assert any("unexplained" in text for text in found.warnings) is not fits
    assert found.problems == ()


def test_first_tokens_that_were_not_seen_leave_the_stages_unknown() -> None:
    few = judge_cell(WATCHED, SEEN, records(hidden=2))
    assert few.split is not None
    assert "8 of 10 requests" in few.split.notes[-1]
    many = judge_cell(WATCHED, SEEN, records(hidden=3))
    assert many.split is None
    assert many.details()["ttft"]["stages"] == "unknown: 3 of 10 requests have no first token of their own"
    assert many.limiting == "unknown"


def test_a_client_that_woke_up_late_is_a_stage_of_its_own() -> None:
    """Three tokens under the first stamp, then one every 10 ms: the first came 20 ms before it."""
    (one, *_) = records().requests
    at = [50.0, 50.0, 50.0, 60.0, 70.0, 80.0]
    late = replace(one, event_ns=tuple(one.sent_ns + round(ms * 1e6) for ms in at))
    assert merged_ms(late) == pytest.approx(20.0)
    assert merged_ms(one) == 0.0
    assert merged_ms(replace(one, event_ns=one.event_ns[:1])) == 0.0
    found = judge_cell(WATCHED, SEEN, replace(records(), requests=(late,) * 10))
    assert found.split is not None
    assert found.split.stages["client"] == pytest.approx(20.0)


def test_what_no_engine_accounts_for_is_the_clients_mean_less_theirs() -> None:
    """Prefill 210 ms a request, decode's whole time from its page; both legs in turn."""
    inside = 1000.0 - (outside_ms(WATCHED, BEFORE, AFTER, 1000.0) or 0.0)
    assert inside > 210.0
    assert outside_ms(WATCHED, BEFORE, AFTER, inside + 6.5) == pytest.approx(6.5)
    assert outside_ms(WATCHED, BEFORE, {**AFTER, "decode-0": Unknown("gone")}, 300.0) is None
    assert outside_ms(WATCHED, AFTER, AFTER, 300.0) is None
    found = judge_cell(replace(WATCHED, http_ms=0.5), SEEN, records())
    plain = judge_cell(WATCHED, SEEN, records())
    assert found.split is not None and plain.split is not None
    assert found.split.stages["hand_over"] == pytest.approx((plain.split.stages["hand_over"] or 0.0) + 0.5)
    assert found.split.closure_error_ms == pytest.approx(0.0, abs=1e-6)


def test_user_space_stamps_leave_the_clients_share_unknown_and_noise_below_zero_is_no_stage() -> None:
    found = judge_cell(replace(WATCHED, router_ms=-0.8), SEEN, records(stamps="user"))
    assert found.split is not None
    assert found.split.stages["client"] is None
    assert found.split.stages["router"] == 0.0
    assert found.details()["router_ms"] == -0.8


@pytest.mark.parametrize("asked", ["rdma", "nvlink"])
def test_another_transport_than_asked_for_is_a_silent_fall_back(asked: Literal["rdma", "nvlink"]) -> None:
    (problem,) = judge_cell(replace(WATCHED, asked=asked), SEEN, records()).problems
    assert problem.startswith(f"transport: {asked} was asked for, KV went over tcp: a silent fall-back")


def test_auto_only_records_what_ran_and_an_unknown_transport_is_said() -> None:
    auto = judge_cell(WATCHED, SEEN, records())
    assert auto.details()["transport"]["used"] == "tcp"
    assert judge_cell(replace(WATCHED, asked="tcp"), SEEN, records()).problems == ()
    dark = judge_cell(replace(WATCHED, asked="tcp"), replace(SEEN, transport_log=LogTransport()), records())
    assert dark.problems == ()
    assert "what ran is not known" in dark.warnings[0]


@pytest.mark.parametrize(
    ("moved", "whole_blocks", "status"),
    [(4080, True, Status.PROVEN), (4080, False, Status.PARTIAL), (4064, True, Status.PARTIAL)],
)
def test_a_connector_of_whole_blocks_leaves_the_end_of_each_prompt_to_decode(
    moved: int, whole_blocks: bool, status: Status
) -> None:
    """Blocks of 16 tokens: of 4096 tokens 4080 are moved, of each of ten requests."""
    text = (DATA / "vllm_decode.prom").read_text()
    for source, count in (("external_kv_transfer", moved), ("local_compute", 4096 - moved), ("p2p", moved)):
        head = f'source="{source}"}} '
        line = next(line for line in text.splitlines() if head in line)
        text = text.replace(line, f"{line.rpartition(' ')[0]} {10 * count}.0")
    decode = parse_exposition(text)
    assert isinstance(decode, Snapshot)
    drain = replace(SEEN.drain, snapshots={**AFTER, "decode-0": decode})
    found = judge_cell(replace(WATCHED, whole_blocks=whole_blocks), replace(SEEN, drain=drain), records())
    assert found.evidence.status is status
    assert found.evidence.valid is (status is Status.PROVEN)


def looks(reasons: tuple[str, ...], watts: float = 500.0) -> tuple[Look, ...]:
    return tuple(
        Look(START_S + t, uuid, 1500, watts, 80, reasons, False)
        for t in range(11)
        for uuid in ("GPU-0", "GPU-1")
    )


GPUS = replace(WATCHED, uuids=("GPU-0", "GPU-1"))


def test_heat_makes_a_cell_invalid_and_a_power_cap_is_said() -> None:
    hot = judge_cell(GPUS, replace(SEEN, looks=looks(("software thermal slowdown",))), records())
    assert [text.split(" (")[0] for text in hot.problems] == ["GPU GPU-0 throttled", "GPU GPU-1 throttled"]
    assert "at 1500 MHz, 80 °C" in hot.problems[0]
    capped = judge_cell(GPUS, replace(SEEN, looks=looks(("software power cap",))), records())
    assert capped.problems == ()
    assert "software power cap" in capped.warnings[0]
    cool = judge_cell(GPUS, replace(SEEN, looks=looks(())), records())
    assert (cool.problems, cool.warnings) == ((), ())
    assert cool.throttle is not None
    traces = [(one["uuid"], len(one["t_s"])) for one in cool.details()["gpu_trace"]]
    assert traces == [("GPU-0", 11), ("GPU-1", 11)]
    assert judge_cell(WATCHED, SEEN, records()).details()["gpu_trace"] == []
    assert cool.throttle.status == "clean"


def test_energy_is_all_gpus_over_the_tokens_of_the_same_time() -> None:
    """2 GPUs x 500 W x 10 s over 10 x 128 tokens; looks before and after the cell do not count."""
    idle = tuple(Look(START_S + t, uuid, 345, 90.0, 40, (), True) for t in (-5, 40) for uuid in GPUS.uuids)
    seen = replace(SEEN, looks=(*idle[:2], *looks(()), *idle[2:]))
    assert judge_cell(GPUS, seen, records()).energy_per_output_token_j == pytest.approx(10_000 / 1280)
    middle = replace(seen, looks=tuple(look for look in seen.looks if 2 <= look.t - START_S <= 8))
    assert judge_cell(GPUS, middle, records()).energy_per_output_token_j == pytest.approx(10_000 / 1280)
    one = replace(seen, looks=tuple(look for look in seen.looks if look.uuid == "GPU-0"))
    assert judge_cell(GPUS, one, records()).energy_per_output_token_j is None
    assert judge_cell(WATCHED, seen, records()).energy_per_output_token_j is None


def test_transfer_errors_in_the_logs_and_engines_that_stay_busy_invalidate() -> None:
    line = "ERROR: NIXL transfer setup/initiation failed for request cmpl-7. reason"
    failed = judge_cell(WATCHED, replace(SEEN, lines={"prefill-0": [], "decode-0": [line]}), records())
    assert failed.problems == ("logs: KV transfer of 1 requests failed (setup_failed)",)
    busy = Drain("busy", 30.0, AFTER, ("decode-0: running 1, waiting 0",))
    stuck = judge_cell(WATCHED, replace(SEEN, drain=busy), records())
    assert stuck.problems == ("not drained after 30 s: decode-0: running 1, waiting 0",)


def test_aggregated_serving_has_no_transport_and_no_pd_path() -> None:
    watched = Watched(Kind.AGGREGATED, {"server-0": Role.SERVER}, {"server-0": "http://127.0.0.1:1"})
    seen = replace(
        SEEN,
        before={"server-0": page("vllm_idle.prom")},
        drain=Drain("drained", 0.1, {"server-0": page("vllm_prefill.prom")}),
        lines={},
    )
    found = judge_cell(watched, seen, records())
    assert found.evidence.status is Status.NOT_APPLICABLE
    assert (found.transport, found.kv_log, found.role_counts) == (None, None, None)


class Bench:
    """Instruments that remember in which order they were used."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.samplers: list[GpuSampler] = []

    def drain(
        self, urls: Mapping[str, str], timeout_s: float, before: Mapping[str, Snapshot | Unknown] | None
    ) -> Drain:
        self.calls.append("before" if before is None else "after")
        return Drain("drained", 0.0, BEFORE if before is None else AFTER)

    def links(self, uuids: Iterable[str]) -> LinkBytes:
        self.calls.append("links")
        return LinkBytes()

    def sampler(self, uuids: tuple[str, ...]) -> GpuSampler:
        hot = ("hardware thermal slowdown",)
        read = [GpuSample(uuid, 0, 1200, hot, False, 90, 300.0, ()) for uuid in uuids]
        self.samplers.append(
            GpuSampler(uuids, period_s=60.0, read=lambda: read, clock=lambda: float(START_S))
        )
        return self.samplers[-1]

    def look(self, urls: Mapping[str, str]) -> Pages:
        self.calls.append("midway")
        return AFTER

    def watch(self, folder: Path, uuids: tuple[str, ...] = ()) -> StackWatch:
        watched = replace(
            WATCHED,
            uuids=uuids,
            asked="rdma",
            logs={name: folder / f"{name}.log" for name in (*ROLES, "router")},
        )
        return StackWatch(watched, Instruments(self.drain, self.links, self.sampler, look=self.look))


def write(path: Path, *lines: str) -> None:
    with path.open("a") as log:
        log.writelines(f"{line}\n" for line in lines)


def test_a_window_reads_lanes_from_the_whole_launch_and_errors_from_its_own_time(tmp_path: Path) -> None:
    lanes = "UCX  INFO  0x1 inter-node cfg#2 tag(tcp/eth0)"
    old, new = (f"NIXL transfer setup/initiation failed for request {name}." for name in ("old", "new"))
    write(tmp_path / "decode-0.log", lanes, old)
    write(tmp_path / "prefill-0.log")
    write(tmp_path / "router.log", "UCX  INFO  0x1 inter-node cfg#2 tag(rc_mlx5/mlx5_0:1)")
    bench = Bench()
    watch = bench.watch(tmp_path)
    with watch.cell() as window:
        write(tmp_path / "decode-0.log", new)
        found = window.judge(records())
    assert bench.calls == ["before", "links", "links", "after"]
    assert found.kv_errors.by_request == {"new": ("setup_failed",)}
    assert found.transport is not None
    assert found.transport.used == "tcp"
    assert any("silent fall-back" in problem for problem in found.problems)
    with watch.cell() as window:
        again = window.judge(records())
    assert again.kv_errors.by_request == {}
    assert again.transport == found.transport


def test_a_look_in_the_middle_is_taken_once_and_halves_the_speeds(tmp_path: Path) -> None:
    bench = Bench()
    watch = bench.watch(tmp_path)
    with watch.cell() as window:
        window.midway()
        window.midway()
        found = window.judge(records())
    assert bench.calls == ["before", "links", "midway", "links", "after"]
    whole, first, second = found.naming.speeds["decode-0"]
    assert whole == first and whole.link_rate, "all of the recorded work lies before the look"
    assert second.link_rate is None
    with watch.cell() as window:
        assert len(window.judge(records()).naming.speeds["decode-0"]) == 1


def test_how_long_loading_took_is_read_from_the_logs_and_belongs_to_the_first_cell(tmp_path: Path) -> None:
    write(
        tmp_path / "decode-0.log",
        "Loading weights took 2.50 seconds",
        "more",
        "Loading weights took 3.25 seconds",
    )
    watch = Bench().watch(tmp_path)
    seen = []
    for _ in range(2):
        with watch.cell() as window:
            naming = window.judge(records()).naming
        seen.append((dict(naming.loading_s), naming.first))
    assert seen == [({"decode-0": 3.25}, True), ({"decode-0": 3.25}, False)]


def test_the_sampler_ends_with_the_window_also_when_the_cell_breaks(tmp_path: Path) -> None:
    bench = Bench()
    watch = bench.watch(tmp_path, uuids=("GPU-0",))

    def measured(window: CellWindow) -> CellEvidence:
        return window.judge(records())

    with watch.cell() as window:
        found = measured(window)
    assert found.throttle is not None
    assert any("hardware thermal slowdown" in problem for problem in found.problems)
    with pytest.raises(RuntimeError, match="role died"), watch.cell():
        raise RuntimeError("role died")
    assert len(bench.samplers) == 2
    assert not [thread for thread in threading.enumerate() if thread.name == "gpu-sampler"]


def test_a_better_table_that_is_logged_later_puts_the_first_aside(tmp_path: Path) -> None:
    rows = {
        "active message by ucp_am_send* from host memory": "tcp/lo",
        "remote memory read by ucp_get*(multi) into host memory from host": "cma/memory",
    }
    log = TransportLog(replace(WATCHED, logs={"decode-0": tmp_path / "decode-0.log"}))
    seen = []
    for title, lane in rows.items():
        table = ["a intra-node cfg#1", title, f"0..inf | zero-copy | {lane}"]
        write(tmp_path / "decode-0.log", *(f"[1.2] [h:1 :0] | {row} |" for row in table))
        seen.append(set(log.read().bulk))
    assert seen == [{"tcp"}, {"shm"}]
