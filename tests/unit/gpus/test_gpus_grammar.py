"""`--gpus`: what each form means on each machine, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.gpus.grammar import (
    MAX_INDEX,
    Device,
    DeviceKind,
    GpuRequest,
    device_env,
    parse_gpus,
    resolve,
    visible_devices,
)
from pytest_pdperf.gpus.inventory import Gpu, Inventory, MigDevice

Recorded = Callable[[str], Inventory]


def gpu(index: int, uuid: str, **more: object) -> Gpu:
    data = {"index": index, "uuid": uuid, "name": "NVIDIA T", "memory_mib": 1000, **more}
    return Gpu.model_validate(data)


FOUR = Inventory(
    gpus=(
        gpu(0, "GPU-11111111-2222-3333-4444-555555555555"),
        gpu(1, "GPU-11112222-0000-0000-0000-000000000001"),
        gpu(2, "GPU-22222222-0000-0000-0000-000000000002"),
        gpu(3, "GPU-33333333-0000-0000-0000-000000000003"),
    )
)
CUT = Inventory(
    gpus=(
        gpu(
            0,
            "GPU-aaaa0000-2222-3333-4444-555555555555",
            mig_enabled=True,
            mig_devices=(
                MigDevice(
                    uuid="MIG-11111111-2222-3333-4444-555555555555", gpu_instance=1, compute_instance=0
                ),
                MigDevice(
                    uuid="MIG-11111111-9999-3333-4444-555555555555", gpu_instance=2, compute_instance=0
                ),
            ),
        ),
        gpu(1, "GPU-bbbb0000-2222-3333-4444-555555555555"),
    )
)


def strings(text: str, inventory: Inventory, variable: str | None) -> list[str]:
    return [device.visible for device in resolve(parse_gpus(text), inventory, variable)]


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("0-7", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("0,2,4-5", (0, 2, 4, 5)),
        ("4", (4,)),
        ("3,1", (3, 1)),
        (" 0 , 2 - 3 ", (0, 2, 3)),
        ("5-5", (5,)),
        ("GPU-5fd4", ("GPU-5fd4",)),
        ("GPU-11111111-2222-3333-4444-555555555555,0", ("GPU-11111111-2222-3333-4444-555555555555", 0)),
        ("MIG-11111111-2222-3333-4444-555555555555", ("MIG-11111111-2222-3333-4444-555555555555",)),
        (
            "MIG-GPU-11111111-2222-3333-4444-555555555555/1/0",
            ("MIG-GPU-11111111-2222-3333-4444-555555555555/1/0",),
        ),
    ],
)
def test_forms(text: str, items: tuple[int | str, ...]) -> None:
    assert parse_gpus(text) == GpuRequest(items)


@pytest.mark.parametrize("text", ["all", "ALL", " all "])
def test_all(text: str) -> None:
    assert parse_gpus(text) == GpuRequest(everything=True)


def test_cpu() -> None:
    assert parse_gpus("cpu") == GpuRequest(cpu=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--gpus is empty; give 0-7 |"),
        ("  ", "--gpus is empty"),
        ("0,,1", "an empty place between commas"),
        ("0,", "an empty place between commas"),
        ("0,2,0", "GPU 0 is named twice (as '0')"),
        ("0-3,2", "GPU 2 is named twice (in '0-3' and in '2')"),
        ("0-3,3-5", "GPU 3 is named twice (in '0-3' and in '3-5')"),
        ("GPU-ab,GPU-AB", "GPU-AB is named twice"),
        ("3-1", "the range '3-1' runs backwards; write 1-3"),
        ("-1", "'-1' is negative; indices start at 0"),
        ("0,-1,2", "'-1' is negative"),
        ("0-", "cannot read '0-'"),
        ("0:3", "cannot read '0:3'; a range is written 0-3"),
        ("0..3", "a range is written 0-3"),
        ("device=1", "leave Docker's `device=` out"),
        ("GPU", "a UUID looks like GPU-5fd4b2c1"),
        ("GPU-xyz", "a UUID looks like"),
        ("MIG-GPU-1111/1", "a UUID looks like"),
        ("two", "cannot read 'two'; use 0-7 |"),
        ("0 1", "cannot read '0 1'"),
        ("1.5", "cannot read '1.5'"),
        ("²", "cannot read '²'"),
        ("٣", "cannot read '٣'"),
        ("all,0", "'all' stands alone"),
        ("0,cpu", "'cpu' stands alone"),
        ("0-999999999", "is no GPU index (largest 1023)"),
        ("99999999999999999999", "is no GPU index"),
        ("1024", "1024 is no GPU index"),
    ],
)
def test_refusals_say_which_part(text: str, message: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        parse_gpus(text)
    assert message in str(caught.value)


indices = st.lists(st.integers(0, MAX_INDEX), unique=True, min_size=1, max_size=20)
uuids = st.lists(st.uuids().map(lambda u: f"GPU-{u}"), unique=True, max_size=3)


@given(indices, uuids)
def test_round_trip(numbers: list[int], names: list[str]) -> None:
    request = GpuRequest((*numbers, *names))
    assert parse_gpus(str(request)) == request


@given(st.text(alphabet="0123456789-, GPUMIGacl/", max_size=24))
def test_whatever_parses_survives_its_own_text(text: str) -> None:
    try:
        request = parse_gpus(text)
    except UsageProblem as problem:
        assert str(problem).startswith("--gpus")
        return
    assert parse_gpus(str(request)) == request
    assert len(set(request.items)) == len(request.items)


def test_four_is_index_four_not_four_gpus(inventory: Recorded) -> None:
    (device,) = resolve(parse_gpus("4"), inventory("hgx-h100-8x"), None)
    assert (device.index, device.visible) == (4, "4")
    assert device.uuid == inventory("hgx-h100-8x").gpus[4].uuid


def test_order_is_kept() -> None:
    assert strings("3,0-1", FOUR, None) == ["3", "0", "1"]


def test_an_index_is_a_position_in_the_parents_list_and_its_strings_are_handed_on() -> None:
    devices = resolve(parse_gpus("1,0"), FOUR, "3,1")
    assert [d.visible for d in devices] == ["1", "3"]
    assert [d.index for d in devices] == [1, 3]
    assert strings("all", FOUR, " 2 , 3 ") == ["2", "3"]
    assert strings("0", FOUR, "GPU-11111111-2222-3333-4444-555555555555") == [FOUR.gpus[0].uuid]
    assert strings("0", FOUR, "GPU-11111111") == ["GPU-11111111"], "an abbreviation is kept as it is"


def test_a_uuid_gets_the_parents_string() -> None:
    assert strings("GPU-2222", FOUR, "3,2") == ["2"]
    assert strings("GPU-2222", FOUR, "GPU-33,GPU-22222222") == ["GPU-22222222"]
    assert strings("GPU-2222", FOUR, None) == ["GPU-2222"], "without a list the word that was given"


@pytest.mark.parametrize(
    ("variable", "shown"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("0,1", ["0", "1"]),
        ("0,-1,2", ["0"]),
        ("-1", []),
        (" 2 , 3 ", ["2", "3"]),
        ("1,9,2", ["1"]),
        ("1,GPU-ffff,2", ["1"]),
        ("1,GPU-1111,2", ["1"]),
        ("NoDevFiles", []),
        ("0,1,", ["0", "1"]),
    ],
)
def test_cuda_visible_devices(variable: str | None, shown: list[str]) -> None:
    assert [device.visible for device in visible_devices(FOUR, variable)] == shown


@pytest.mark.parametrize("variable", ["0,0", "GPU-11111111,GPU-11111111-2222", "2,1,2"])
def test_a_list_that_names_a_device_twice_is_refused(variable: str) -> None:
    with pytest.raises(UsageProblem, match=r"are one device; the driver rejects"):
        visible_devices(FOUR, variable)


ONE = "GPU-9bd41c17-0000-4000-8000-000000000001"
ZERO = "GPU-03d9b97d-0000-4000-8000-000000000000"


@pytest.mark.parametrize(
    ("variable", "shown"),
    [
        (None, [0, 1]),
        ("", []),
        ("0", [0]),
        ("0,-1,1", [0]),
        ("-1,0", []),
        ("-2,0", []),
        (" 1 , 0 ", [1, 0]),
        ("01,0", [1, 0]),
        ("1,9,0", [1]),
        ("0,", [0]),
        ("0,,1", [0]),
        (",0", []),
        ("0,foo", [0]),
        ("NoDevFiles", []),
        ("0,1,-1,-1", [0, 1]),
        (ONE, [1]),
        (ONE.upper(), [1]),
        ("GPU-9b", [1]),
        ("GPU-9bd41c17-", [1]),
        ("GPU-", []),
        (ONE.lower(), []),
        (f"{ZERO},{ONE}", [0, 1]),
        (f"{ONE} ,{ZERO}", [1, 0]),
        (f"0,{ONE}", [0]),
        (f"0,{ZERO},1", [0]),
        (f"{ONE},0", [1]),
        ("1,GPU-ffff,0", [1]),
        (f"MIG-{ZERO}/0/0,0", []),
        (f"0,MIG-{ZERO}/0/0,1", [0]),
        ("0,0", None),
        ("0,1,0", None),
        (f"{ZERO},{ZERO}", None),
        (f"{ZERO},GPU-03d9b97d", None),
    ],
)
def test_the_same_as_cuda(inventory: Recorded, variable: str | None, shown: list[int] | None) -> None:
    """What cuDeviceGetUuid answered on two H200 with driver 580.159.04; None: cuInit refused the list."""
    box = inventory("recorded-h200-2x")
    if shown is None:
        with pytest.raises(UsageProblem, match="the driver rejects"):
            visible_devices(box, variable)
    else:
        assert [device.index for device in visible_devices(box, variable)] == shown


@pytest.mark.parametrize("variable", ["1;0", "0 1", "1.5,0", "0,0x1", "+1"])
def test_numbers_that_cuda_reads_in_part_are_refused(variable: str) -> None:
    with pytest.raises(UsageProblem, match=r"cannot read .*; use commas"):
        visible_devices(FOUR, variable)


def test_old_and_new_mig_names_are_the_same_slice() -> None:
    old = "MIG-GPU-aaaa0000-2222-3333-4444-555555555555/1/0"
    (device,) = visible_devices(CUT, old)
    assert device == Device(old, DeviceKind.MIG, "MIG-11111111-2222-3333-4444-555555555555", 0)
    with pytest.raises(UsageProblem, match="are the same device"):
        resolve(parse_gpus(f"{old},MIG-11111111-2222-3333-4444-555555555555"), CUT, None)


def test_mig_slices_by_uuid_and_by_all() -> None:
    first, second = (mig.uuid for mig in CUT.gpus[0].mig_devices)
    assert strings(second, CUT, None) == [second]
    assert strings("all", CUT, None) == [first, second, "1"]
    assert strings("all", CUT, f"{second},GPU-bbbb") == [second, "GPU-bbbb"]
    assert {d.kind for d in resolve(parse_gpus("all"), CUT, None)} == {DeviceKind.MIG, DeviceKind.GPU}
    assert strings(second, CUT, "0") == [second], "a visible GPU shows its slices"


@pytest.mark.parametrize(
    ("text", "variable", "inventory", "message"),
    [
        ("4", None, FOUR, "there is no GPU 4; this machine has 4, indices 0-3"),
        ("0-7", None, FOUR, "--gpus 0-7: there is no GPU 4"),
        (
            "2",
            "3,1",
            FOUR,
            "there is no GPU 2; CUDA_VISIBLE_DEVICES='3,1' shows 2, indices 0-1 (positions in",
        ),
        ("1", "3,-1,0", FOUR, "shows one, index 0"),
        ("0", "", FOUR, "CUDA_VISIBLE_DEVICES='' hides every GPU"),
        ("all", "-1", FOUR, "CUDA_VISIBLE_DEVICES='-1' hides every GPU"),
        (
            "GPU-1111",
            None,
            FOUR,
            "GPU-1111 is ambiguous: GPU-11111111-2222-3333-4444-555555555555, GPU-11112222",
        ),
        ("GPU-ffff", None, FOUR, "no device GPU-ffff on this machine; it has GPU-11111111"),
        ("MIG-1111", None, FOUR, "no device MIG-1111"),
        ("GPU-3333", "0,1", FOUR, "GPU-3333 is there, but CUDA_VISIBLE_DEVICES hides it"),
        ("2,GPU-2222", None, FOUR, "2 and GPU-2222 are the same device"),
        ("0", None, CUT, "GPU 0 is in MIG mode; name its slices: MIG-11111111-2222"),
        ("GPU-aaaa", None, CUT, "GPU 0 is in MIG mode"),
        ("MIG-11111111", None, CUT, "MIG-11111111 is ambiguous"),
        ("MIG-11111111-9999", "1", CUT, "CUDA_VISIBLE_DEVICES hides it"),
        ("MIG-GPU-aaaa0000-2222-3333-4444-555555555555/7/0", None, CUT, "no device MIG-GPU-aaaa0000"),
    ],
)
def test_requests_that_do_not_work(
    text: str, variable: str | None, inventory: Inventory, message: str
) -> None:
    with pytest.raises(UsageProblem) as caught:
        resolve(parse_gpus(text), inventory, variable)
    assert message in str(caught.value)


def test_a_gpu_in_mig_mode_without_slices() -> None:
    empty = Inventory(gpus=(gpu(0, "GPU-aa", mig_enabled=True),))
    with pytest.raises(UsageProblem, match="has no slice; create one or switch MIG off"):
        resolve(parse_gpus("0"), empty, None)
    with pytest.raises(UsageProblem, match="every visible GPU is in MIG mode and has no slice"):
        resolve(parse_gpus("all"), empty, None)


def test_no_driver_names_both_ways_out(inventory: Recorded) -> None:
    with pytest.raises(UsageProblem) as caught:
        resolve(parse_gpus("0-7"), inventory("no-driver"), None)
    for part in ("--gpus 0-7", "no working NVIDIA driver", "--engine sim", "--gpus cpu"):
        assert part in str(caught.value)


def test_cpu_needs_no_driver(inventory: Recorded) -> None:
    (device,) = resolve(parse_gpus("cpu"), inventory("no-driver"), "")
    assert (device.visible, device.kind, device.uuid) == ("cpu", DeviceKind.CPU, "")


@given(
    st.lists(st.integers(0, 3), unique=True, min_size=1).flatmap(
        lambda parent: st.tuples(
            st.just(parent), st.lists(st.integers(0, len(parent) - 1), unique=True, min_size=1, max_size=4)
        )
    )
)
def test_slicing_by_position_never_renumbers(case: tuple[list[int], list[int]]) -> None:
    parent, wanted = case
    devices = resolve(parse_gpus(",".join(map(str, wanted))), FOUR, ",".join(map(str, parent)))
    assert [d.visible for d in devices] == [str(parent[i]) for i in wanted]
    assert [d.uuid for d in devices] == [FOUR.gpus[parent[i]].uuid for i in wanted]


def test_environment_of_a_child() -> None:
    devices = resolve(parse_gpus("0-1"), FOUR, "3,1")
    assert device_env(devices, {}) == {"CUDA_VISIBLE_DEVICES": "3,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert device_env(devices, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == {"CUDA_VISIBLE_DEVICES": "3,1"}
    assert device_env([Device("cpu", DeviceKind.CPU)], {}) == {"CUDA_VISIBLE_DEVICES": ""}


def test_names_for_people() -> None:
    assert [str(d) for d in resolve(parse_gpus("all"), CUT, None)] == [
        "MIG-11111111-2222-3333-4444-555555555555 on GPU 0",
        "MIG-11111111-9999-3333-4444-555555555555 on GPU 0",
        "GPU 1",
    ]
    assert str(Device("cpu", DeviceKind.CPU)) == "cpu"
