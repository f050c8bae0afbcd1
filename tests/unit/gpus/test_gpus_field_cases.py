"""Lists of devices, held to public bug reports: every form, with what it must mean."""

from __future__ import annotations

import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.gpus.grammar import GpuRequest, device_env, parse_gpus, visible_devices
from pytest_pdperf.gpus.inventory import Inventory, MigDevice
from tests.field_cases import FieldCase, field_case
from tests.unit.gpus.test_gpus_grammar import gpu

SLICES = (
    MigDevice(uuid="MIG-11111111-2222-3333-4444-555555555555", gpu_instance=1, compute_instance=0),
    MigDevice(uuid="MIG-11111111-2222-3333-4444-666666666666", gpu_instance=2, compute_instance=0),
)
WHOLE = Inventory(
    gpus=(
        gpu(0, "GPU-11111111-2222-3333-4444-555555555555"),
        gpu(1, "GPU-aaaaaaaa-2222-3333-4444-555555555555"),
        gpu(2, "GPU-22222222-2222-3333-4444-555555555555"),
        gpu(3, "GPU-bbbbbbbb-2222-3333-4444-555555555555"),
    )
)
CUT = Inventory(
    gpus=(gpu(0, "GPU-11111111-2222-3333-4444-555555555555", mig_enabled=True, mig_devices=SLICES),)
)


@field_case("051")
def test_051_cuda_visible_devices(case: FieldCase) -> None:
    answers = {str(key): want for key, want in case.want["cvd"].items()}
    for value in case.given["cvd"]:
        inventory = CUT if value.startswith("MIG") else WHOLE
        want = answers.get(value, "kept as string")
        if isinstance(want, str) and want.startswith("error"):
            with pytest.raises(UsageProblem, match="are one device"):
                visible_devices(inventory, value)
            continue
        found = [device.visible for device in visible_devices(inventory, value)]
        if isinstance(want, list):
            assert found == [str(entry).strip() for entry in want]
        elif value == "":
            assert found == [] and len(visible_devices(inventory, None)) == len(WHOLE.gpus), (
                "unset is not empty"
            )
        else:
            assert found == [value], f"{want}: the very string is handed on"
            assert device_env(visible_devices(inventory, value))["CUDA_VISIBLE_DEVICES"] == value


@field_case("051")
def test_051_dockers_forms(case: FieldCase) -> None:
    """`--gpus 2` is a count for Docker and an index here, so Docker's own forms are refused by name."""
    for text in case.given["docker_gpus"]:
        if text == "all":
            assert parse_gpus(text) == GpuRequest(everything=True)
        elif text.isdecimal():
            assert parse_gpus(text) == GpuRequest((int(text),))
        else:
            with pytest.raises(UsageProblem):
                parse_gpus(text)
            with pytest.raises(UsageProblem, match="leave Docker's `device=` out"):
                parse_gpus(text.strip('"'))
