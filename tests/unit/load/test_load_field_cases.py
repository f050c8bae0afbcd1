"""Prompts and answers, held to public bug reports: every input of a kind, with the answer that it must get."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.evidence.exposition import Snapshot, parse_exposition
from pytest_pdperf.evidence.record import Expected
from pytest_pdperf.evidence.verdict import judge_evidence
from pytest_pdperf.load.bodies import body_of
from pytest_pdperf.load.decode import Expect, to_record
from pytest_pdperf.load.exchange import End, Exchange
from pytest_pdperf.load.plan import plan_cell
from pytest_pdperf.load.planned import Planned
from pytest_pdperf.load.prompts import check_context
from pytest_pdperf.load.run_signs import settle_chat
from pytest_pdperf.load.target import Target
from pytest_pdperf.measure.records import RequestRecord, Status
from pytest_pdperf.measure.summarise import summarise
from pytest_pdperf.spec.topology import Role
from pytest_pdperf.spec.workload import Cell, ClosedLoop, Stream
from tests.field_cases import FieldCase, field_case
from tests.unit.load.test_load_decode import DONE, LENIENT, event, exchange
from tests.unit.measure import measure_records

BLOCK = 16
ANY_OUTPUT = Expect(ignore_eos=False)
STEP_NS = 10_000_000
TARGET = Target(url="http://127.0.0.1:1", model="m", vocab=(1000, 30000))


def cell_of(
    name: str, requests: int, low: int, high: int | None = None, *, output: int = 4, warmups: int = 1
) -> Cell:
    stream = Stream(
        input_tokens=(low, high or low),
        output_tokens=output,
        requests=requests,
        arrival=ClosedLoop(concurrency=1),
    )
    return Cell(workload="w", id=name, streams=(stream,), warmups=warmups)


@field_case("027")
def test_027_whose_count_is_believed(case: FieldCase) -> None:
    for row, want in zip(case.given["rows"], case.want["chosen"], strict=True):
        count = row["usage"]
        running = [None] * row["chunks"] if count is None else spread(count, row["chunks"])
        found = streamed([event("x", usage=None if n is None else (3, n)) for n in running])
        assert (found.output_tokens, found.token_count_source) == (want["n"], want["source"])
        said = summarise(measure_records.records([found]), measure_records.cell(1, 1), "t").warnings
        assert any("events are counted as tokens" in line for line in said) == want.get("approximate", False)
        several = count is not None and count > row["chunks"] > 1
        assert any(f"bring {(count or 0) / row['chunks']:.2g} tokens an event" in line for line in said) == (
            several or "suspect" in want
        )
        assert found.not_streamed == ("suspect" in want)
        assert any("arrived in one piece" in line for line in said) == ("suspect" in want)


def streamed(events: Sequence[bytes]) -> RequestRecord:
    """The record of an answer whose events come one by one, STEP_NS apart."""
    made = Exchange(
        "main", 0, False, 3, 5, status=200, end=End.COMPLETE, sent_ns=0, end_ns=len(events) * STEP_NS
    )
    body = b""
    for i, one in enumerate([*events[:-1], events[-1] + event("", finish="stop") + DONE]):
        body += one
        made.size = len(body)
        made.mark((i + 1) * STEP_NS, (i + 1) * STEP_NS)
    return to_record(made, body, "completions", LENIENT)


def spread(count: int, chunks: int) -> list[int]:
    """Running counts of `chunks` events that bring `count` tokens together."""
    return [count * (i + 1) // chunks for i in range(chunks)]


def encode(tokenizer: dict[str, Any], text: str) -> list[int]:
    """The toy tokenizer of a server that takes text."""
    pieces = sorted(((p, int(i)) for i, p in tokenizer["vocab"].items()), key=lambda pair: -len(pair[0]))
    if tokenizer["encode"] == "single characters":
        pieces = [pair for pair in pieces if len(pair[0]) == 1]
    ids: list[int] = []
    while text:
        piece, number = next(pair for pair in pieces if text.startswith(pair[0]))
        ids.append(number)
        text = text[len(piece) :]
    return ids


def answered(planned: Sequence[int], prompt_tokens: int, expect: Expect = ANY_OUTPUT) -> RequestRecord:
    body = event("x", usage=(prompt_tokens, 1)) + event("", finish="stop", usage=(prompt_tokens, 1)) + DONE
    return to_record(exchange(body, input_tokens=len(planned)), body, "completions", expect)


@field_case("030")
def test_030_ids_that_do_not_stay_as_many(case: FieldCase) -> None:
    ids, target = case.given["ids"], case.given["target"]
    text = "".join(case.given["toy_tokenizer"]["vocab"][str(i)] for i in ids)
    again = encode(case.given["toy_tokenizer"], text)
    assert (text, again, len(again)) == (
        case.want["decoded"],
        case.want["reencoded"],
        case.want["reencoded_len"],
    ), "what a server does that is given the text"
    assert len(ids) == target
    sent = json.loads(body_of(Planned(tuple(ids), 1), TARGET))
    assert sent["prompt"] == ids, "the client sends the ids themselves"
    assert answered(ids, target).status is Status.OK
    wrong = answered(ids, len(again))
    assert wrong.status is Status.WRONG_PROMPT_LENGTH
    assert wrong.error == f"server counted {len(again)} prompt tokens, planned {target}"
    good, bad = (answered(ids, n, LENIENT) for n in (target, len(again)))
    result = summarise(measure_records.records([good, good, bad]), measure_records.cell(3, 1), "t")
    low, high = sorted((target, len(again)))
    mean = (2 * target + len(again)) / 3
    assert result.prompt_tokens_each == {"min": low, "mean": pytest.approx(mean), "max": high}
    assert result.from_json(result.to_json()).prompt_tokens_each == result.prompt_tokens_each


@field_case("030")
def test_030_a_surplus_is_one_constant_or_the_tokenizers_differ(case: FieldCase) -> None:
    ids, off = case.given["ids"], case.want["reencoded_len"]
    template = len(ids) + 7
    chat = [answered(ids, template, LENIENT) for _ in range(3)]
    assert [r.status for r in settle_chat(chat)] == [Status.OK] * 3
    mixed = settle_chat([*chat, answered(ids, off, LENIENT)])
    assert [r.status for r in mixed] == [Status.OK] * 3 + [Status.WRONG_PROMPT_LENGTH]
    assert "constant 7" in mixed[-1].error


def test_a_constant_that_no_template_adds_is_another_tokenizer() -> None:
    def said(planned: int, counted: int) -> bool:
        made = [
            measure_records.request(planned_input_tokens=planned, prompt_tokens=counted) for _ in range(3)
        ]
        lines = summarise(measure_records.records(made), measure_records.cell(3, 1), "t").warnings
        return any("another tokenizer" in line for line in lines)

    assert said(1000, 5000)
    assert not said(1000, 1400), "a long template"
    assert not said(16, 250), "a template beside a short prompt"
    assert not said(4096, 4400)


@field_case("032")
def test_032_no_prompt_comes_twice(case: FieldCase) -> None:
    cells = [cell_of(row["id"], row["n"], row["len"], warmups=2) for row in case.given["cells"]]
    seed = case.given["cells"][0]["seed"]
    arms = [
        [plan_cell(cell, TARGET, seed=seed, salt="run-1")[0] for cell in cells] for _ in ("pd", "aggregated")
    ]
    assert (arms[0] == arms[1]) == case.want["prompt_sets_equal_between_arms"]
    measured = {r.prompt for plan in arms[0] for r in plan.requests}
    warm = {r.prompt for plan in arms[0] for r in plan.warmups}
    assert len(measured) == case.want["unique_prompts_required"]
    assert bool(measured & warm) == case.want["warmup_prompt_in_measured_set"]
    heads = {prompt[:BLOCK] for prompt in measured | warm}
    assert len(heads) == len(measured) + len(warm), "they differ inside the first KV block"
    later = {r.prompt for cell in cells for r in plan_cell(cell, TARGET, seed=seed, salt="run-2")[0].requests}
    assert not later & measured, "the next run, against the same servers, sends others"


@field_case("032")
def test_032_a_warm_cache_is_seen_in_the_counters(case: FieldCase) -> None:
    def page(values: dict[str, float]) -> Snapshot:
        found = parse_exposition("".join(f"{name} {value}\n" for name, value in values.items()))
        assert isinstance(found, Snapshot)
        return found

    before, after = page(case.given["prom_before"]), page(case.given["prom_after_c4"])
    found = judge_evidence("pd", {"d": before}, {"d": after}, Expected(3), {"d": Role.DECODE}, wall_s=1.0)
    assert found.cache_hit_rate == pytest.approx(case.want["c4_hit_rate"])
    status, _, detail = case.want["verdict"].partition(": ")
    hits = [line for line in found.problems if "hit rate" in line]
    assert bool(hits) == (status == "invalid")
    limit = detail.removeprefix("hit rate ").replace("1.0 ", "1 ")
    assert all(line.endswith(f"hit rate {limit}") for line in hits)


@field_case("033")
def test_033_what_cannot_fit_is_never_sent(case: FieldCase) -> None:
    spread_by = case.given["input_len"] * case.given["range_ratio"]
    low, high = (round(case.given["input_len"] + sign * spread_by) for sign in (-1, 1))
    assert high == case.want["max_possible_input"]
    limit = min(model["max_model_len"] for model in case.given["models_endpoint"]["data"])
    assert limit == case.given["max_model_len"]
    with pytest.raises(UsageProblem, match=f"up to {high + case.given['output_len']} tokens"):
        check_context(cell_of("c", 4, low, high, output=case.given["output_len"]), limit)
    for name in ("boundary", "boundary_plus_1"):
        row = case.want[name]
        cell = cell_of("c", 1, row["input"], output=row["output"])
        if row["ok"]:
            check_context(cell, limit)
        else:
            with pytest.raises(UsageProblem, match=f"context of {limit}"):
                check_context(cell, limit)
