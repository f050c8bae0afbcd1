"""The baseline file: what it looks like, and every broken one that must be refused with place, value and
way out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.gate import baseline as module
from pytest_pdperf.gate.baseline import (
    BaselineFile,
    BaselineProblem,
    Pin,
    dumps,
    note_for,
    parse,
    read,
    significant,
)
from pytest_pdperf.gate.fingerprint import BaselineKey, CellRef, slug
from tests.unit.gate.gate_tables import CATALOGUE, KEY, REF, Spec, launch

PATH = Path("baselines/x.json")


def file_of(*pins: Pin) -> BaselineFile:
    names = {name for pin in pins for one in pin.launches for name in one.values}
    return BaselineFile(
        schema=1,
        keys={KEY.digest: KEY},
        metrics={name: note_for(name, CATALOGUE) for name in names},
        cells={REF.id: pins},
    )


def pin_of(*values: float, status: str = "current") -> Pin:
    launches = tuple(
        launch({"output_tps": value, "ttft_ms_p50": 123.456789}, day=day) for day, value in enumerate(values)
    )
    pin = Pin.model_validate(
        {"key": KEY.digest, "workload_digest": "w0", "reason": "test", "launches": launches, "status": status}
    )
    return pin.signed(KEY)


GOOD = dumps(file_of(pin_of(1000.0, 1010.0), pin_of(900.0, status="superseded")))


def test_a_file_survives_the_round_trip() -> None:
    file = parse(PATH, GOOD, CATALOGUE)
    assert dumps(file) == GOOD
    (pin,) = file.current(KEY).values()
    assert [one.values["output_tps"] for one in pin.launches] == [1000.0, 1010.0]


def test_the_text_is_reviewable() -> None:
    lines = GOOD.splitlines()
    assert len([line for line in lines if '"id":' in line]) == 3, "one launch a line"
    assert "123.5" in GOOD and "123.456" not in GOOD
    longer = dumps(file_of(pin_of(1000.0, 1010.0, 990.0), pin_of(900.0, status="superseded"))).splitlines()
    assert len(longer) == len(lines) + 1
    assert json.loads(GOOD) == json.loads(json.dumps(json.loads(GOOD), sort_keys=True))
    assert GOOD.index('"cells"') < GOOD.index('"keys"') < GOOD.index('"metrics"') < GOOD.index('"schema"')


def test_key_order_of_the_file_does_not_matter() -> None:
    shuffled = json.dumps(dict(reversed(json.loads(GOOD).items())))
    assert dumps(parse(PATH, shuffled, CATALOGUE)) == GOOD


@pytest.mark.parametrize(("value", "rounded"), [(123.456, 123.5), (0.00123456, 0.001235), (98765.4, 98770.0)])
def test_four_significant_digits(value: float, rounded: float) -> None:
    assert significant(value) == rounded


def edited(change: Callable[[dict[str, Any]], object]) -> str:
    content = json.loads(GOOD)
    change(content)
    return json.dumps(content)


def first_launch(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["cells"][REF.id][0]["launches"][0]
    return found


BROKEN: dict[str, tuple[str, str]] = {
    "empty": ("", "empty"),
    "white space": (" \n", "empty"),
    "truncated": (GOOD[: len(GOOD) // 2], "not strict JSON"),
    "merge markers": ("<<<<<<< ours\n" + GOOD, "not strict JSON"),
    "a list": ("[]", "expected an object, got list"),
    "NaN": (GOOD.replace("1010.0", "NaN"), "NaN is not a finite number"),
    "Infinity": (GOOD.replace("1010.0", "Infinity"), "Infinity is not a finite number"),
    "minus nan": (GOOD.replace("1010.0", "-nan"), "not strict JSON"),
    "overflow": (GOOD.replace("1010.0", "1e999"), "1e999 is not a finite number"),
    "zero": (GOOD.replace("1010.0", "0.0"), "launches.1.values.output_tps"),
    "negative": (GOOD.replace("1010.0", "-5.0"), "value -5.0"),
    "a number as text": (GOOD.replace("1010.0", '"1010.0"'), "launches.1.values.output_tps"),
    "null": (GOOD.replace("1010.0", "null"), "launches.1.values.output_tps"),
    "no samples": (edited(lambda c: first_launch(c)["n"].update(output_tps=0)), "n.output_tps"),
    "counts of another metric": (edited(lambda c: first_launch(c)["n"].pop("output_tps")), "same metrics"),
    "no schema": (edited(lambda c: c.pop("schema")), "schema: expected a whole number, got None"),
    "schema true": (edited(lambda c: c.update(schema=True)), "schema: expected a whole number"),
    "newer schema": (edited(lambda c: c.update(schema=2)), "schema 2 is newer than 1"),
    "schema before any": (edited(lambda c: c.update(schema=0)), "schema 0 is too old"),
    "unknown field": (edited(lambda c: c.update(cell={})), "cell: Extra inputs"),
    "missing field": (edited(lambda c: c.pop("cells")), "cells: Field required"),
    "no launches": (edited(lambda c: c["cells"][REF.id][0].update(launches=[])), "launches"),
    "unit changed": (
        edited(lambda c: c["metrics"]["ttft_ms_p50"].update(unit="s")),
        "metrics.ttft_ms_p50: stored as 's', lower is better; the metric table now says 'ms', lower",
    ),
    "direction changed": (
        edited(lambda c: c["metrics"]["output_tps"].update(better="lower")),
        "the metric table now says 'tok/s', higher is better",
    ),
    "metric not listed": (edited(lambda c: c["metrics"].pop("output_tps")), "which metrics does not list"),
    "key not listed": (edited(lambda c: c.update(keys={})), "is not in keys"),
    "key altered": (
        edited(lambda c: c["keys"][KEY.digest].update(gpu="NVIDIA H200")),
        "does not fit its content",
    ),
    "cell twice": (GOOD.replace('"schema"', '"cells": {},\n "schema"'), "'cells' stands twice"),
    "two current pins": (
        edited(lambda c: c["cells"][REF.id][1].update(status="current")),
        "duplicated cell, two current pins",
    ),
    "launch twice": (
        edited(lambda c: c["cells"][REF.id][0]["launches"].append(first_launch(c))),
        "launch 'run-0' is listed twice",
    ),
    "edited by hand": (
        edited(lambda c: first_launch(c)["values"].update(output_tps=700.0)),
        "edited by hand",
    ),
    "launch cut out by hand": (edited(lambda c: c["cells"][REF.id][0]["launches"].pop()), "edited by hand"),
    "not a date": (edited(lambda c: first_launch(c).update(date="yesterday")), "launches.0.date"),
    "date without zone": (
        edited(lambda c: first_launch(c).update(date="2025-03-01T00:00:00")),
        "launches.0.date",
    ),
}


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_a_broken_file_is_refused_with_place_and_way_out(case: str) -> None:
    text, expected = BROKEN[case]
    with pytest.raises(BaselineProblem) as caught:
        parse(PATH, text, CATALOGUE)
    message = str(caught.value)
    assert expected in message
    assert str(PATH) in message and "way out: " in message
    assert isinstance(caught.value, UsageProblem)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_no_such_number_can_be_made_into_a_launch(value: float) -> None:
    with pytest.raises(ValidationError):
        launch({"output_tps": value})


def test_missing_unreadable_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BaselineProblem, match="does not exist"):
        read(tmp_path / "none.json", CATALOGUE)
    with pytest.raises(BaselineProblem, match="cannot be read"):
        read(tmp_path, CATALOGUE)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BaselineProblem, match="cannot be read"):
        read(binary, CATALOGUE)


def test_only_fix_reads_what_was_edited_by_hand() -> None:
    text, _ = BROKEN["edited by hand"]
    file = parse(PATH, text, CATALOGUE, trust_edits=True)
    assert len(file.hand_edited) == 1 and REF.id in file.hand_edited[0]
    assert "700.0" in dumps(file), "writing keeps the broken digest of pins that nobody accepted anew"
    assert parse(PATH, dumps(file), CATALOGUE, trust_edits=True).hand_edited == file.hand_edited
    with pytest.raises(BaselineProblem, match="-5"):
        parse(PATH, BROKEN["negative"][0], CATALOGUE, trust_edits=True)


def test_an_older_schema_is_migrated_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    old = json.loads(GOOD)
    old["schema"] = -1
    old["units"] = old.pop("metrics")
    old["pins"] = old.pop("cells")
    seen = []

    def first(content: dict[str, Any]) -> dict[str, Any]:
        seen.append(content["schema"])
        return {**{k: v for k, v in content.items() if k != "units"}, "metrics": content["units"]}

    def second(content: dict[str, Any]) -> dict[str, Any]:
        seen.append(content["schema"])
        return {**{k: v for k, v in content.items() if k != "pins"}, "cells": content["pins"]}

    migrated = parse(PATH, json.dumps(old), CATALOGUE, migrations={-1: first, 0: second})
    assert dumps(migrated) == GOOD
    assert seen == [-1, 0]
    assert all(version < module.SCHEMA for version in module.MIGRATIONS)


def test_a_metric_that_no_table_knows_is_left_to_the_judge() -> None:
    catalogue = {name: spec for name, spec in CATALOGUE.items() if name != "output_tps"}
    assert parse(PATH, GOOD, catalogue).metrics["output_tps"].unit == "tok/s"
    with pytest.raises(KeyError, match="nearest: 'output_tps'"):
        note_for("output_tsp", CATALOGUE)


def test_stream_metrics_keep_the_unit_of_their_metric() -> None:
    assert note_for("steady.ttft_ms_p50", CATALOGUE).unit == "ms"
    changed = {**CATALOGUE, "ttft_ms_p50": Spec("ttft_ms_p50", "s", 1, 0.1)}
    with pytest.raises(BaselineProblem, match="stored as 'ms'"):
        parse(PATH, GOOD, changed)


def test_hard_keys_differ_and_soft_ones_do_not() -> None:
    other = KEY.model_copy(update={"gpu": "NVIDIA H200", "link": "nvlink/rdma"})
    assert KEY.differences(other) == (
        "gpu: stored 'NVIDIA H200', now 'NVIDIA H100 80GB HBM3'",
        "link: stored 'nvlink/rdma', now 'nvlink/tcp'",
    )
    names = "gpu gpu_count link engine model dtype topology topology_digest definitions simulated"
    assert set(BaselineKey.model_fields) == set(names.split())


@pytest.mark.parametrize("name", ["../../etc", "..", "", "a/b c", "Qwen/Qwen3-32B"])
def test_names_become_one_safe_path_component(name: str) -> None:
    made = slug(name)
    assert made and "/" not in made and not made.startswith(".")


def test_a_cell_reference_survives_its_id() -> None:
    assert CellRef.parse(REF.id, REF.digest) == REF
